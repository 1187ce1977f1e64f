"""How many of our modules a token passes between the card's reply and the tenant's `async for`."""

import sys
from types import FrameType

from gpulease.client.decode.supervisor.decoder import Decoder
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, play, submit

MAX_MODULES = 25
"""Somebody who looks for a lost token reads at most these. It is 24 today, the next step's plan included, but not the
launch of that step, which comes between the two."""


def test_a_token_passes_few_modules_between_the_cards_reply_and_its_tenant(shared_daemon: Daemon) -> None:
    modules: set[str] = set()
    is_launching = False

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal is_launching
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if function == "DecodeEngine.start" and event in ("call", "return"):
            is_launching = event == "call"
        if is_launching:
            return
        if event != "call" or not (path := path.rpartition("/gpulease/")[2]).startswith(("client/", "protocol/")):
            return
        # The reply comes with the socket's bell, or is found by polling. What ran before that starts the step.
        if function in ("_wake", "RingChannel.spin"):
            modules.clear()
        modules.add(path)

    async def scene(decoder: Decoder) -> None:
        name = next(iter(PROMPTS))
        counts = []
        generation = submit(decoder, name)
        sys.setprofile(note)
        try:
            async for _ in generation:
                counts.append(sorted(modules))
        finally:
            sys.setprofile(None)
        # Not the first token, which waits for the prompt, nor the last one, which ends the sequence, nor each sixteenth
        # one, whose sequence takes another block: the walk of most tokens.
        walk = sorted(counts[1:-1], key=len)[len(counts) // 2]
        assert {"client/transport/ring.py", "client/decode/scheduler/scheduler.py"} <= set(walk)
        assert len(walk) <= MAX_MODULES, walk

    play(shared_daemon, scene)
