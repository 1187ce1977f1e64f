"""Penalties, biases, scores, priorities: the same tokens in any company, after a loss, and as numpy computes them."""

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, TOKENS, Outputs, play, read, submit

PENALISED = SamplingParameters(
    temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
)
BIASED = SamplingParameters(temperature=1.0, seed=4, min_p=0.02, logit_bias=((7, 4.0), (300, -100.0)), min_tokens=4)
GREEDY_PENALISED = SamplingParameters(frequency_penalty=2.0)
FILTERED = SamplingParameters(
    temperature=1.0, seed=5, allowed_token_ids=(5, 6, 7, 8, 9), bad_words=((6,), (5, 5), (7, 8), (8, 5, 7))
)
GUIDED = {"a": PENALISED, "b": BIASED, "c": FILTERED, "d": GREEDY_PENALISED}


def guided(decoder: Decoder, name: str, **options: Any) -> Generation:
    given: dict[str, Any] = {"max_tokens": TOKENS, "tenant_id": name[0], "ranks": 5, "sampling": GUIDED[name]}
    return decoder.submit(list(PROMPTS[name]), **given | options)


async def guided_alone(decoder: Decoder) -> Outputs:
    return {name: await read(guided(decoder, name)) for name in GUIDED}


def test_guided_sequences_have_the_tokens_together_that_they_have_alone(daemon: Daemon, alone: Outputs) -> None:
    """Next to unguided sequences, which keep their tokens, and across the loss of a region in the middle."""

    async def scene(decoder: Decoder) -> None:
        expected = await guided_alone(decoder)
        generations = {name: guided(decoder, name) for name in GUIDED}
        others = [submit(decoder, name) for name in ("b", "c", "d")]
        found = dict(zip(GUIDED, await asyncio.gather(*map(read, generations.values())), strict=True))
        assert found == expected
        for name, other in zip(("b", "c", "d"), others, strict=True):
            assert await read(other) == alone[name]
        # Its guide continues where it was: the replay's prompt contains the tokens emitted so far.
        for name in ("a", "c"):
            lost = guided(decoder, name)
            output = [await anext(lost) for _ in range(5)]
            daemon.revoke(decoder.regions.pools[name].region.lease_id)
            output += await read(lost)
            assert lost.replays == 1
            assert output == expected[name]

    play(daemon, scene)


def test_lists_of_tokens_are_kept_and_change_no_other_choice(daemon: Daemon) -> None:
    """Greedy, so each token is the likeliest of those that the lists allow."""

    async def scene(decoder: Decoder) -> None:
        emitted = [one.token for one in await read(guided(decoder, "c"))]
        assert set(emitted) <= {5, 7, 8, 9}
        assert len(set(emitted)) > 2
        pairs = list(itertools.pairwise(emitted))
        assert not {(5, 5), (7, 8)} & set(pairs)
        prompt = [1, 2, 3]
        plain = [one.token for one in await read(decoder.submit(prompt, max_tokens=8, tenant_id="a"))]
        # The third token is bad after the two before it, and nowhere else.
        words = (tuple(plain[:3]),)
        sampling = SamplingParameters(bad_words=words)
        other = await read(decoder.submit(prompt, max_tokens=8, tenant_id="a", sampling=sampling, ranks=2))
        assert [one.token for one in other[:2]] == plain[:2]
        assert other[2].token == other[2].ranks[1][0] != plain[2]
        # Log-probabilities are those of the model's own logits.
        assert other[2].log_probability == other[2].ranks[1][1]

    play(daemon, scene)


async def logits_of(decoder: Decoder, tokens: list[int]) -> Any:
    """Return the logits after some tokens, from the engine's last step."""
    await read(decoder.submit(tokens, max_tokens=1, tenant_id="c"))
    rows = 1 if len(tokens) <= 1 else len(tokens)
    return (await decoder.engine.logits(rows))[rows - 1]


def test_penalised_tokens_are_those_that_numpy_chooses(daemon: Daemon) -> None:
    """Greedy, so each token is the highest of the logits as OpenAI's and the reference's formulas change them."""
    sampling = SamplingParameters(repetition_penalty=1.5, presence_penalty=0.75, frequency_penalty=0.5)

    async def scene(decoder: Decoder) -> None:
        prompt = [5, 9, 9, 300]
        output = await read(decoder.submit(prompt, max_tokens=8, tenant_id="c", sampling=sampling))
        tokens: list[int] = []
        for emitted in output:
            logits = await logits_of(decoder, prompt + tokens)
            changed = logits.copy()
            seen = sorted({*prompt, *tokens})
            changed[seen] = np.where(
                changed[seen] > 0, changed[seen] / np.float32(1.5), changed[seen] * np.float32(1.5)
            )
            for token in set(tokens):
                changed[token] -= np.float32(0.75 + 0.5 * tokens.count(token))
            assert emitted.token == int(changed.argmax())
            wide = logits.astype(np.float64)
            expected = wide[emitted.token] - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
            assert emitted.log_probability == pytest.approx(expected, abs=1e-5)
            tokens.append(emitted.token)
        assert len(set(tokens)) > 1

    play(daemon, scene)


def test_a_prompt_s_scores_are_those_of_its_tokens_emitted(daemon: Daemon, alone: Outputs) -> None:
    """The scores of what a sequence emitted are the log-probabilities that it was emitted with, to the bit."""

    async def scene(decoder: Decoder) -> None:
        prompt = [*PROMPTS["b"], *(emitted.token for emitted in alone["b"])]
        scored = decoder.submit(prompt, max_tokens=1, tenant_id="b", ranks=3, scores_prompt=True)
        await read(scored)
        assert [score.position for score in scored.prompt_scores] == list(range(1, len(prompt)))
        assert [score.token for score in scored.prompt_scores] == prompt[1:]
        logs = [score.log_probability for score in scored.prompt_scores[len(PROMPTS["b"]) - 1 :]]
        assert logs == [emitted.log_probability for emitted in alone["b"]]
        for score in scored.prompt_scores:
            assert len(score.ranks) == 3
            assert [log for _, log in score.ranks] == sorted((log for _, log in score.ranks), reverse=True)
            own = dict(score.ranks).get(score.token)
            assert own is None or own == score.log_probability
            assert score.log_probability <= score.ranks[0][1]

    play(daemon, scene)


def test_the_likeliest_token_is_the_greedy_one(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        output = await read(decoder.submit([1, 2, 3], max_tokens=6, tenant_id="a", ranks=20))
        assert all(len(emitted.ranks) == 20 for emitted in output)
        assert [emitted.ranks[0] for emitted in output] == [(one.token, one.log_probability) for one in output]

    play(daemon, scene)


def test_stop_tokens_end_a_sequence_and_min_tokens_puts_that_off(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        plain = [one.token for one in await read(decoder.submit([1, 2, 3], max_tokens=12, tenant_id="a"))]
        stop = plain[3]
        first = plain.index(stop)
        sampling = SamplingParameters(stop_token_ids=(stop,))
        short = await read(decoder.submit([1, 2, 3], max_tokens=12, tenant_id="a", sampling=sampling))
        assert [one.token for one in short] == plain[: first + 1]
        later = SamplingParameters(stop_token_ids=(stop,), min_tokens=6)
        long = await read(decoder.submit([1, 2, 3], max_tokens=12, tenant_id="a", sampling=later))
        assert stop not in [one.token for one in long[:6]]
        assert len(long) > 6

    play(daemon, scene)


def test_the_lower_priority_is_admitted_first_within_its_tenant(daemon: Daemon) -> None:
    """Tenant a has places for two; a third of priority 0 waits behind a fourth of -1."""

    async def scene(decoder: Decoder) -> None:
        ends: list[str] = []

        async def ended(name: str, generation: Generation) -> list[Emitted]:
            output = await read(generation)
            ends.append(name)
            return output

        names = {"first": 0, "second": 0, "usual": 0, "later": 5, "urgent": -1}
        await asyncio.gather(
            *(
                ended(name, decoder.submit([1, 2], max_tokens=8, tenant_id="a", priority=priority))
                for name, priority in names.items()
            )
        )
        assert ends.index("urgent") < ends.index("usual") < ends.index("later")

    play(daemon, scene)


def test_lists_that_may_leave_no_token_are_refused(daemon: Daemon) -> None:
    everything = tuple((token,) for token in range(200))

    async def scene(decoder: Decoder) -> None:
        for sampling in (
            SamplingParameters(allowed_token_ids=(5, 6), bad_words=((5,), (5, 6))),
            SamplingParameters(allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=1),
            SamplingParameters(allowed_token_ids=tuple(range(200)), bad_words=everything),
        ):
            with pytest.raises(RequestRejected, match="a token must be left") as refused:
                decoder.submit([1, 2], max_tokens=1, tenant_id="a", sampling=sampling)
            assert refused.value.parameter == "allowed_token_ids"
        # If only the end is allowed, it comes at once.
        sampling = SamplingParameters(allowed_token_ids=(7,), stop_token_ids=(7,))
        ending = decoder.submit([1, 2], max_tokens=3, tenant_id="a", sampling=sampling)
        assert [one.token for one in await read(ending)] == [7]

    play(daemon, scene)


def test_a_biased_token_outside_of_the_vocabulary_is_refused(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        for sampling in (
            SamplingParameters(logit_bias=((10**6, 1.0),)),
            SamplingParameters(stop_token_ids=(10**6,), min_tokens=1),
            SamplingParameters(allowed_token_ids=(5, 10**6)),
            SamplingParameters(bad_words=((5, 10**6),)),
        ):
            with pytest.raises(RequestRejected, match="tokens must be") as refused:
                decoder.submit([1, 2], max_tokens=1, tenant_id="a", sampling=sampling)
            assert getattr(sampling, refused.value.parameter)
        assert not decoder.scheduler.tenants["a"].live

    play(daemon, scene)
