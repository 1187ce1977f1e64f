"""Embeddings of texts: OpenAI's own client against the numpy reference, and the pooling that models' files name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode import TINY_MODEL, Checkpoint, ModelRejected, Pooling, open_model
from gpulease.client.decode.pooling import PooledRows, f32_of_bf16
from helpers.daemon import Daemon
from helpers.decode.made_models import tiny_model
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig
from helpers.decode.reference import Reference
from helpers.decode.tiny_copies import LAST, MEAN, embedding_model

if TYPE_CHECKING:
    import openai

TEXTS = ["Changed in version 3.7: the with statement", "An iterator", "A coroutine is", "An iterator"]


@pytest.fixture(scope="module", params=[MEAN, LAST], ids=["mean", "last"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("model") / "tiny", request.param)


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon, model: Path) -> Iterator[OpenAiRig]:
    with openai_rig(shared_daemon, wait_s=60, model=model) as running:
        yield running


def embed(client: openai.OpenAI, texts: Any = TEXTS, **options: Any) -> Any:
    return client.embeddings.create(model=MODEL, input=texts, **options)


def vectors_of(reply: Any) -> NDArray[np.float32]:
    return np.array([one.embedding for one in reply.data], np.float32)


def expected(checkpoint: Checkpoint, tokens: list[int]) -> NDArray[np.float32]:
    rows = Reference(*tiny_model()).rows(tokens)
    vector = rows.mean(0) if checkpoint.pooling is Pooling.MEAN else rows[-1]
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def test_vectors_are_the_reference_s_in_any_company(rig: OpenAiRig, client: openai.OpenAI, model: Path) -> None:
    checkpoint = open_model(model)
    reply = embed(client)
    together = vectors_of(reply)
    assert [one.index for one in reply.data] == [0, 1, 2, 3]
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-6)
    alone = np.concatenate([vectors_of(embed(client, text)) for text in TEXTS])
    assert (together.view(np.uint32) == alone.view(np.uint32)).all()
    tokenizer = checkpoint.tokenizer()
    for vector, text in zip(together, TEXTS, strict=True):
        # The engine's activations are bf16.
        assert float(vector @ expected(checkpoint, tokenizer.encode(text))) > 0.999
    assert float(together[0] @ together[2]) < 0.99
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(tokenizer.encode(text)) for text in TEXTS)


def test_forms_of_inputs_and_vectors(rig: OpenAiRig, client: openai.OpenAI, model: Path) -> None:
    tokens = open_model(model).tokenizer().encode(TEXTS[0])
    plain = vectors_of(embed(client, TEXTS[0]))
    for inputs in (tokens, [tokens], [TEXTS[0]]):
        assert (vectors_of(embed(client, inputs)) == plain).all()
    # Without encoding_format, the client requests base64 and decodes it.
    assert (vectors_of(embed(client, TEXTS[0], encoding_format="float")) == plain).all()
    with rig.http() as http:
        reply = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    assert (np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4") == plain[0]).all()
    assert vectors_of(embed(client, TEXTS[0], dimensions=128)).shape == (1, 128)
    # These are more inputs than the tenant may have sequences or waiting requests.
    assert len(embed(client, [[7, number % 500] for number in range(100)]).data) == 100


def test_an_input_is_cut_to_as_many_tokens_as_its_caller_says(client: openai.OpenAI) -> None:
    tokens = [number % 500 for number in range(7, 507)]
    for cut, kept in (
        ({"truncate_prompt_tokens": 9}, tokens[-9:]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, tokens[:9]),
    ):
        vectors = [
            vectors_of(embed(client, tokens, extra_body=cut)),
            vectors_of(embed(client, kept)),
        ]
        assert (vectors[0] == vectors[1]).all()


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": ""}, "input", "not empty"),
        ({"input": []}, "input", "up to 2048"),
        ({"input": [1, "a"]}, "input", "list of tokens"),
        ({"input": ["a", [1, 2.5]]}, "input", "list of tokens"),
        ({}, "input", "must be a string"),
        ({"input": "a", "dimensions": 64}, "dimensions", "send 128"),
        ({"input": "a", "dimensions": True}, "dimensions", "an integer"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "truncate": 5}, "truncate", "not a known parameter"),
        ({"input": [[1] * 200]}, "input", "Please reduce the length of the input"),
        ({"input": "a" * 5000}, "input", "Please reduce the length of the input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
        ({"input": [[100000]]}, "input", "tokens must be"),
        ({"input": "\ud800"}, "input", "can't be cut"),
    ],
)
def test_wrong_bodies_are_refused(rig: OpenAiRig, body: dict[str, Any], param: str | None, told: str) -> None:
    with rig.http() as http:
        reply = http.post("/v1/embeddings", content=json.dumps(body))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert told in error["message"]


def test_a_key_and_the_model_s_name_are_checked(rig: OpenAiRig) -> None:
    with rig.http() as http:
        assert http.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404
        assert http.post("/v1/embeddings", json={"input": "a"}, headers={"Authorization": ""}).status_code == 401


def test_a_lost_region_changes_no_vector(rig: OpenAiRig, client: openai.OpenAI) -> None:
    inputs = [[5 + number] * 90 for number in range(6)]
    before = vectors_of(embed(client, inputs))
    seen = rig.decoder.rebinds

    async def revoke() -> None:
        await rig.decoder.regions.pools["ann"].region.revoke("because")

    rig.wait_for(revoke())
    assert (vectors_of(embed(client, inputs)) == before).all()
    assert rig.decoder.rebinds == seen + 1


def test_a_model_that_says_nothing_has_no_vectors(shared_daemon: Daemon) -> None:
    with openai_rig(shared_daemon) as plain, plain.http() as http:
        reply = http.post("/v1/embeddings", json={"input": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model")


@pytest.mark.parametrize(
    ("pooling", "modules", "told"),
    [
        ({"pooling_mode_cls_token": True}, None, "not 'pooling_mode_cls_token'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None, "alone"),
        ({}, None, "not 'nothing'"),
        ({"pooling_mode": "max"}, None, "not 'max'"),
        ({"pooling_mode_mean_tokens": "yes"}, None, "must be true or false"),
        (MEAN, [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "'Dense' must be one of"),
        (MEAN, [{"type": "x.Pooling", "path": "../elsewhere"}], "must be a folder's name"),
        (MEAN, {"type": "x.Pooling"}, "must be a list"),
    ],
)
def test_other_poolings_are_refused_by_name(tmp_path: Path, pooling: Any, modules: Any, told: str) -> None:
    with pytest.raises(ModelRejected, match=told):
        open_model(embedding_model(tmp_path / "model", pooling, modules))


def test_the_newer_form_of_a_pooling_s_configuration(tmp_path: Path) -> None:
    assert open_model(embedding_model(tmp_path / "a", {"pooling_mode": "mean"})).pooling is Pooling.MEAN
    assert open_model(embedding_model(tmp_path / "b", {"pooling_mode": "lasttoken"})).pooling is Pooling.LAST
    assert open_model(TINY_MODEL).pooling is None


def test_rows_may_come_in_any_chunks_and_again() -> None:
    rows = np.random.default_rng(1).standard_normal((20, 8)).astype(np.float32)
    for pooling in Pooling:
        whole = PooledRows(pooling, 8)
        whole.add(0, rows)
        cut = PooledRows(pooling, 8)
        for begin, end in [(0, 7), (0, 3), (0, 9), (9, 20)]:
            cut.add(begin, rows[begin:end])
        assert (cut.vector() == whole.vector()).all()
        assert cut.count == 20
    assert (PooledRows(Pooling.MEAN, 8).vector() == 0).all()
    assert f32_of_bf16(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]
