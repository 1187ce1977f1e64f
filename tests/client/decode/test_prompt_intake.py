"""Prompts before they reach the scheduler: counted by tenant, and read by real processes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from gpulease.client.decode.decode_errors import AdmissionRefused, ModelRejected, RequestRejected, TextNotRead
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.decode_reports import PromptRefused
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, TenantConfig
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.supervisor.prompt_intake import PromptIntake
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.text_jobs import TextLimits
from gpulease.client.decode.text.tokenizer import Tokenizer

SETTINGS: Final = SchedulerSettings(max_sequences=8, max_rows=8, prefill_rows=8, context=64, vocabulary=512)
TENANTS: Final = (TenantConfig("ann", 1, 4, max_waiting=2), TenantConfig("bob", 1, 4, max_waiting=0))
GREEDY: Final = SamplingParameters()
DOUBLING: Final = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(27) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def intake_of(template: str | None) -> tuple[PromptIntake, ContinuousBatchScheduler, list[PromptRefused]]:
    async def tokenizer() -> Tokenizer:
        library = LibraryTokenizer(models.BPE(dict(LETTERS), []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        return Tokenizer(library, None, None if template is None else ChatTemplate(template, {}, "a file"), "a file")

    scheduler, refused = ContinuousBatchScheduler(SETTINGS, TENANTS), list[PromptRefused]()
    intake = PromptIntake(scheduler, tokenizer, 1, refused.append, DecodeLog())
    intake.limits = TextLimits(memory_bytes=96 << 20)
    return intake, scheduler, refused


def play(
    scene: Callable[[PromptIntake, list[PromptRefused]], Coroutine[Any, Any, None]], template: str | None = None
) -> None:
    async def part() -> None:
        intake, _, refused = intake_of(template)
        try:
            await scene(intake, refused)
        finally:
            await intake.stop()

    asyncio.run(part())


def test_a_tenant_has_places_for_what_may_live_and_what_may_wait() -> None:
    intake, scheduler, refused = intake_of(None)
    with intake.place("ann"), intake.place("ann"), intake.place("ann"):
        with pytest.raises(AdmissionRefused, match="QuotaExceeded: tenant ann: 2 of its requests are already waiting"):
            intake.place("ann").__enter__()
        # Nobody else's places are taken.
        with intake.place("bob"):
            assert intake.coming == {"ann": 3, "bob": 1}
    assert refused == [
        PromptRefused(
            "ann",
            "QuotaExceeded",
            "QuotaExceeded: tenant ann: 2 of its requests are already waiting; send this request again later",
        )
    ]
    # Those that the scheduler has count as well.
    assert scheduler.submit(PromptRequest("ann", "1", (1,), GREEDY, 8, wait_s=9), now=0) == []
    assert scheduler.submit(PromptRequest("ann", "2", (1,), GREEDY, 8, wait_s=9), now=0) == []
    with intake.place("ann"), pytest.raises(AdmissionRefused, match="QuotaExceeded"):
        intake.place("ann").__enter__()
    scheduler.cancel("1")
    with intake.place("ann"), intake.place("ann"):
        pass
    with pytest.raises(RequestRejected, match="the decoder has no tenant 'eve'"):
        intake.place("eve").__enter__()


def test_texts_and_chats_are_read_and_refusals_are_reported() -> None:
    async def scene(intake: PromptIntake, refused: list[PromptRefused]) -> None:
        letters = [LETTERS[letter] for letter in "ab"]
        assert await intake.read_text("ann", "ab") == tuple(letters)
        assert await intake.read_chat("ann", [{"role": "user", "content": "a"}], {"rest": "b"}) == tuple(letters)
        with pytest.raises(AdmissionRefused, match="TooLarge"):
            await intake.read_text("ann", "a" * 65)
        with pytest.raises(RequestRejected, match="does not accept"):
            await intake.read_chat("ann", [{"role": "user", "content": "a"}], {"rest": None})
        assert [(report.tenant_id, report.reason) for report in refused] == [
            ("ann", "TooLarge"),
            ("ann", "RequestRejected"),
        ]

    play(scene, "{{ messages[0].content + rest }}")


def test_messages_are_at_fault_where_the_template_takes_others() -> None:
    async def scene(intake: PromptIntake, refused: list[PromptRefused]) -> None:
        for _ in range(2):
            with pytest.raises(TextNotRead, match="needs more than 96 MiB of memory"):
                await intake.read_chat("ann", [{"role": "user", "content": "double"}], {})
        assert len(await intake.read_chat("ann", [{"role": "user", "content": "hi"}], {})) == 2
        assert [report.reason for report in refused] == ["TextNotRead"] * 2
        assert intake.replaced == 2

    play(scene, f"{{% if messages[0].content == 'double' %}}{DOUBLING}{{% endif %}}{{{{ messages[0].content }}}}")


def test_a_template_is_at_fault_that_takes_no_chat_and_is_not_run_again() -> None:
    async def scene(intake: PromptIntake, refused: list[PromptRefused]) -> None:
        for _ in range(3):
            with pytest.raises(ModelRejected, match="the model's chat template exceeds the limits of a prompt"):
                await intake.read_chat("ann", [{"role": "user", "content": "a"}], {})
        # Once for the messages, and once for the smallest chat.
        assert intake.replaced == 2
        assert refused == []
        assert len(await intake.read_text("ann", "ab")) == 2

    play(scene, DOUBLING)


def test_a_model_without_a_template_takes_texts_alone() -> None:
    async def scene(intake: PromptIntake, _: list[PromptRefused]) -> None:
        with pytest.raises(
            RequestRejected, match=r"no chat template\. Send a completion request with the prompt as text"
        ):
            await intake.read_chat("ann", [{"role": "user", "content": "a"}], {})

    play(scene)
