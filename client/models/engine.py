"""A model in a session: its code, its weights and its batches' places on the card."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from gpulease.client import Buffer, KernelArgs, Module
from gpulease.client.aio import GpuSession
from gpulease.client.models.settings import ModelSettings


class Engine:
    """Runs batches, one after the other; made by `open`.

    Inputs and outputs lie in memory that the session's worker shares (`session.empty`), so that a batch is put together
    where the card takes it from.
    """

    def __init__(self, session: GpuSession, settings: ModelSettings, module: Module, buffers: list[Buffer]) -> None:
        self._session, self._settings, self._module = session, settings, module
        self._weights, self._input, self._output = buffers
        self._into = session.empty(settings.max_batch * settings.input_bytes, np.uint8)
        self._out_of = session.empty(settings.max_batch * settings.output_bytes, np.uint8)
        self._in_view, self._out_view = self._into.data, self._out_of.data
        self._args: dict[int, KernelArgs] = {}

    @classmethod
    async def open(cls, session: GpuSession, settings: ModelSettings) -> Self:
        """Load the model. Raises LoadFailed, AllocFailed and their like."""
        module = await session.module_load(settings.module)
        sizes = (
            max(1, len(settings.weights)),
            settings.max_batch * settings.input_bytes,
            settings.max_batch * settings.output_bytes,
        )
        buffers = [await session.mem_alloc(size) for size in sizes]
        if settings.weights:
            await session.mem_write(buffers[0], 0, settings.weights)
        await session.sync()
        return cls(session, settings, module, buffers)

    async def run(self, payloads: Sequence[bytes]) -> list[bytes]:
        """The outputs of whole items' inputs, in one launch. Raises what the session raises."""
        settings, at = self._settings, 0
        for payload in payloads:
            self._in_view[at : at + len(payload)] = payload
            at += len(payload)
        items = at // settings.input_bytes
        size = items * settings.output_bytes
        await self._session.mem_write(self._input, 0, self._into[:at])
        grid, block = [items * settings.blocks_per_item], [settings.threads_per_block]
        await self._session.launch(self._module, settings.kernel, grid, block, self._args_for(items))
        await self._session.mem_read(self._output, 0, size, into=self._out_of[:size])
        outputs, at = [], 0
        for payload in payloads:
            part = len(payload) // settings.input_bytes * settings.output_bytes
            outputs.append(bytes(self._out_view[at : at + part]))
            at += part
        return outputs

    async def check(self) -> None:
        """Raises what the session ended of, if it did. Not while a batch is under way."""
        await self._session.sync()

    def _args_for(self, items: int) -> KernelArgs:
        found = self._args.get(items)
        if found is None:
            found = KernelArgs().push_buffer(self._weights).push_buffer(self._input).push_buffer(self._output)
            found.push_u32(items)
            for constant in self._settings.constants:
                found.push_u32(constant)
            self._args[items] = found
        return found
