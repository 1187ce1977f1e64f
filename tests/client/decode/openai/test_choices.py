"""Several choices and prompts, echoes and scores, with OpenAI's own client and as lm-evaluation-harness sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig

if TYPE_CHECKING:
    import openai

PROMPT = "Changed in version"
USER = [{"role": "user", "content": "What does the with statement do?"}]


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon) -> Iterator[OpenAiRig]:
    with openai_rig(shared_daemon, wait_s=60.0) as running:
        yield running


def complete(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 7}
    return client.completions.create(**given | options)


def test_a_choice_is_what_its_own_seed_gives_alone(client: openai.OpenAI) -> None:
    many = complete(client, n=3)
    alone = [complete(client, seed=7 + number) for number in range(3)]
    assert [choice.text for choice in many.choices] == [one.choices[0].text for one in alone]
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.text for choice in many.choices}) > 1
    assert many.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert many.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)


def test_best_of_sends_the_likeliest(client: openai.OpenAI) -> None:
    alone = [complete(client, seed=7 + number, logprobs=0).choices[0] for number in range(4)]
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 6 for choice in alone}
    best = complete(client, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.usage.completion_tokens == 24


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_of_choices_has_each_whole(client: openai.OpenAI, is_chat: bool) -> None:
    def asked(**options: Any) -> Any:
        if not is_chat:
            return complete(client, n=3, **options)
        return client.chat.completions.create(model=MODEL, messages=USER, max_tokens=6, seed=7, n=3, **options)  # type: ignore[arg-type]

    whole = [choice.message.content if is_chat else choice.text for choice in asked().choices]
    texts, finishes = ["", "", ""], []
    for chunk in asked(stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += (choice.delta.content if is_chat else choice.text) or ""
        finishes += [choice.index] if choice.finish_reason else []
    assert texts == whole
    assert sorted(finishes) == [0, 1, 2]


def test_prompts_of_one_request_are_answered_in_their_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The with statement", "A list is"]
    many = complete(client, prompt=prompts, n=2)
    alone = [complete(client, prompt=prompt, n=2) for prompt in prompts]
    assert [choice.text for choice in many.choices] == [choice.text for one in alone for choice in one.choices]
    assert many.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)


def test_one_prompt_that_can_t_fit_refuses_the_request_and_leaves_nothing(
    rig: OpenAiRig, client: openai.OpenAI
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt=[[5, 6], [5] * 159])
    assert refused.value.code == "context_length_exceeded"
    assert rig.do(lambda: rig.decoder.scheduler.tenants["ann"].is_idle)


def test_an_echo_is_the_prompt_before_its_answer(client: openai.OpenAI) -> None:
    plain, echoed = complete(client), complete(client, echo=True, logprobs=2)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert "".join(logprobs.tokens) == echoed.choices[0].text
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(log < 0 for log in logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    offsets = [echoed.choices[0].text[:offset] for offset in logprobs.text_offset]
    assert offsets == ["".join(logprobs.tokens[:place]) for place in range(len(logprobs.tokens))]
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True))
    assert streamed == echoed.choices[0].text


def test_an_echo_alone_computes_no_answer(client: openai.OpenAI) -> None:
    only = complete(client, echo=True, max_tokens=0, logprobs=1)
    assert (only.choices[0].text, only.choices[0].finish_reason) == (PROMPT, "length")
    assert len(only.choices[0].logprobs.tokens) == only.usage.prompt_tokens
    assert only.usage.completion_tokens == 0


def test_likeliest_tokens_of_a_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=20  # type: ignore[arg-type]
    )  # fmt: skip
    assert done.choices[0].logprobs is not None
    for token in done.choices[0].logprobs.content or []:
        assert len(token.top_logprobs) == 20
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)


def loglikelihoods(client: openai.OpenAI, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Send what lm-evaluation-harness's local-completions sends for `loglikelihood`, and read the reply as it does."""
    done = client.completions.create(
        model=MODEL,
        prompt=[context + continuation for context, continuation in pairs],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    found = []
    for choice, (context, _) in zip(done.choices, pairs, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        logs = choice.logprobs.token_logprobs[len(context) : -1]
        tokens, tops = choice.logprobs.tokens[len(context) : -1], choice.logprobs.top_logprobs[len(context) : -1]
        is_greedy = all(max(top, key=lambda text: top[text]) == token for token, top in zip(tokens, tops, strict=True))
        found.append((sum(logs), is_greedy))
    return found


def test_a_task_of_lm_evaluation_harness_is_scored(rig: OpenAiRig, client: openai.OpenAI) -> None:
    """In this multiple choice, the model's own continuation is the likeliest of four, and the only greedy one."""

    async def encoded(text: str) -> list[int]:
        return (await rig.decoder.tokenizer()).encode(text)

    for question in (PROMPT, "The with statement", "Return the"):
        answer = complete(client, prompt=question, temperature=0, max_tokens=5).choices[0].text
        context = rig.wait_for(encoded(question))
        options = [answer, " wombats and zebras", " 77 777 7777", " tuple tuple tuple"]
        tokens = [rig.wait_for(encoded(question + option))[len(context) :] for option in options]
        scores = loglikelihoods(client, [(context, option) for option in tokens])
        assert max(range(4), key=lambda place: scores[place][0] / len(tokens[place])) == 0
        assert [is_greedy for _, is_greedy in scores] == [True, False, False, False]


def test_template_variables_reach_the_model_s_template(rig: OpenAiRig, client: openai.OpenAI) -> None:
    """The tiny model's template has no variables of its own; add_generation_prompt exists in every template."""
    with_prompt = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=2)  # type: ignore[arg-type]
    without = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=2, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}}  # type: ignore[arg-type]
    )  # fmt: skip
    assert with_prompt.usage is not None
    assert without.usage is not None
    assert without.usage.prompt_tokens < with_prompt.usage.prompt_tokens
