"""A decode server's settings: the example is valid, and each mistake gives an error that names it."""

import os
import re
from pathlib import Path

import pytest

from gpulease.client.decode import TINY_MODEL, DecoderSettings, TenantConfig
from gpulease.client.decode.openai.decode_settings import (
    DEFAULT_LISTEN,
    EXAMPLE,
    DecodeSettings,
    load_decode_settings,
)
from gpulease.client.decode.scheduler.model_residency import ResidencyLimits
from gpulease.client.decode.text.named_prefixes import NamedPrefix
from gpulease.client.errors import InvalidRequest

KEY = "0123456789abcdef"
DIGEST = "ab" * 32
TENANT = f'[tenants.ann]\nkey_sha256 = "{DIGEST}"\nmax_concurrent = 2\nmax_blocks = 8\n'
MODEL = 'model = "m.gguf"\n'


def loaded(folder: Path, text: str) -> DecodeSettings:
    path = folder / "decode.toml"
    path.write_text(text)
    return load_decode_settings(path)


def test_the_example_can_be_used_as_it_is() -> None:
    settings = load_decode_settings(EXAMPLE)
    assert settings.model.resolve() == TINY_MODEL.resolve()
    assert settings.listen == DEFAULT_LISTEN
    assert settings.tenants == (TenantConfig("ann", 8, 64), TenantConfig("bob", 8, 64, weight=3.0))
    assert settings.keys.tenant("Bearer replace-this-key") == "ann"
    assert settings.keys.tenant("Bearer replace-this-key-too") == "bob"
    assert settings.keys.tenant("Bearer another") is None


def test_few_settings_are_enough(tmp_path: Path) -> None:
    settings = loaded(tmp_path, MODEL + TENANT)
    assert (settings.model, settings.name, settings.address, settings.audit) == (tmp_path / "m.gguf", "m", None, False)
    assert settings.tenants == (TenantConfig("ann", 2, 8),)
    assert loaded(tmp_path, MODEL + 'aliases = ["org/m:1"]\n' + TENANT).aliases == ("org/m:1",)


def test_the_engine_s_settings_are_the_decoder_s(tmp_path: Path) -> None:
    text = (
        "[engine]\nmax_rows = 5\npreempts = true\nregion_life_secs = 90\nrebinds_at_once = 7\n"
        "rebind_interval_secs = 0.5\ntext_processes = 3\n"
    )
    wanted = DecoderSettings(
        5, preempts=True, region_life_s=90, rebinds_at_once=7, rebind_interval_s=0.5, text_processes=3
    )
    assert loaded(tmp_path, MODEL + text + TENANT).decoder == wanted
    assert loaded(tmp_path, MODEL + TENANT).decoder == DecoderSettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = \n", "line 1"),
        (MODEL, "tenants must be given"),
        (TENANT, "model must be given"),
        (MODEL + "colour = 1\n" + TENANT, "there is no setting colour; known are model, name"),
        ("model = 5\n" + TENANT, "model must be a string, not 5"),
        (MODEL + "[engine]\nmax_rows = 0\n" + TENANT, "engine.max_rows must be a whole number from 1 to 1024, not 0"),
        (MODEL + "[engine]\npreempts = 1\n" + TENANT, "engine.preempts must be true or false, not 1"),
        (
            MODEL + "[engine]\nregion_life_secs = 0.05\n" + TENANT,
            "engine.region_life_secs must be a number from 0.1 to 86400, not 0.05",
        ),
        (
            MODEL + "[engine]\ntext_processes = 0\n" + TENANT,
            "engine.text_processes must be a whole number from 1 to 64, not 0",
        ),
        (
            MODEL + "[engine]\nregion_life_secs = nan\n" + TENANT,
            "engine.region_life_secs must be a number from 0.1 to 86400, not nan",
        ),
        (
            MODEL + "[engine]\nrebinds_at_once = 0\n" + TENANT,
            "engine.rebinds_at_once must be a whole number from 1 to 1000, not 0",
        ),
        (
            MODEL + "[engine]\nrebind_interval_secs = -1\n" + TENANT,
            "engine.rebind_interval_secs must be a number from 0 to 3600, not -1",
        ),
        (MODEL + "[engine]\nrows = 8\n" + TENANT, "there is no setting engine.rows; did you mean"),
        (MODEL + 'aliases = ["a b"]\n' + TENANT, "aliases must be a list of at most 16 names, each of 1 to 128"),
        (MODEL + f"aliases = {['a'] * 17}\n" + TENANT, "aliases must be a list of at most 16 names"),
        (MODEL + 'aliases = ["a", "a"]\n' + TENANT, "aliases must differ from each other, and from the model's name"),
        (MODEL + "[tenants]\n", "1 to 256 tables"),
        (MODEL + "[tenants]\nann = 1\n", "tenants.ann must be a table, not 1"),
        (MODEL + TENANT.replace("ann", '"a b"'), "a tenant's name must be 1 to 64 letters, digits and .-_, not 'a b'"),
        (MODEL + TENANT.replace("max_blocks = 8", ""), "set either max_blocks or context_tokens"),
        (MODEL + TENANT + "context_tokens = 5\n", "set either max_blocks or context_tokens"),
        (MODEL + TENANT + "weight = 0\n", "tenants.ann.weight must be a number above 0, not 0"),
        (MODEL + TENANT + 'key_file = "k"\n', "set either key_sha256 or key_file"),
        (MODEL + TENANT + TENANT.replace("ann", "bob"), "ann and bob have the same key"),
        (
            MODEL + TENANT.replace("max_concurrent = 2", "max_concurrent = true"),
            "tenants.ann.max_concurrent must be a whole number of at least 1, not True",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        loaded(tmp_path, text)


MANY = """
[pool]
memory = "2GiB"
parked_memory = "4GiB"
min_stay_secs = 2
[engine]
max_rows = 8
wait_secs = 3
[models.small]
model = "small"
preload = true
[models.large]
model = "/models/large.gguf"
engine = { max_rows = 16, chat_tokens = 9 }
"""


def test_many_models_have_settings_and_tenants_of_their_own(tmp_path: Path) -> None:
    bob = TENANT.replace("ann", "bob").replace("ab" * 32, "cd" * 32) + 'models = ["small"]\n'
    settings = loaded(tmp_path, MANY.replace("preload", 'aliases = ["org/small"]\npreload') + TENANT + bob)
    assert (settings.models["small"].aliases, settings.models["large"].aliases) == (("org/small",), ())
    small, large = settings.models["small"], settings.models["large"]
    assert (small.path, large.path) == (tmp_path / "small", Path("/models/large.gguf"))
    assert (small.is_preloaded, large.is_preloaded) == (True, False)
    assert (small.settings.max_rows, large.settings.max_rows) == (8, 16)
    # A model's setting that is not given is that of [engine].
    assert (small.wait_s, large.wait_s, large.chat_tokens) == (3, 3, 9)
    assert [[tenant.id for tenant in one.tenants] for one in (small, large)] == [["ann", "bob"], ["ann"]]
    assert settings.pool is not None
    assert settings.pool.limits() == ResidencyLimits(2 << 30, 4 << 30, 2.0, None, 256)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL + MANY + TENANT, "model and [models.NAME] can't both be given"),
        (MANY.partition("[models")[0] + TENANT, "model must be given, or tables [models.NAME]"),
        (MANY.replace("[pool]", "[poo]") + TENANT, "there is no setting poo; did you mean 'pool'"),
        (MANY.partition("[engine]")[2].join(["[engine]", ""]) + TENANT, "[pool] must be given with [models.NAME]"),
        ('name = "x"\n' + MANY + TENANT, "name can't be given with [models.NAME]"),
        (
            MANY.replace("small]", '"a b"]') + TENANT,
            "a model's name must be 1 to 64 letters, digits and .-_, not 'a b'",
        ),
        (MANY + TENANT + 'models = ["z"]\n', "tenants.ann.models: there is no [models.z]"),
        (MANY + TENANT + 'models = ["small"]\n', "no tenant may use the model large"),
        ('aliases = ["x"]\n' + MANY + TENANT, "aliases can't be given with [models.NAME]"),
        (
            MANY.replace("preload = true", 'aliases = ["org/x", "large"]') + TENANT,
            "models.small.aliases: large must be the name of one model alone",
        ),
        (
            MANY.replace("preload = true", 'aliases = ["org/x"]').replace("engine =", 'aliases = ["org/x"]\nengine =')
            + TENANT,
            "models.large.aliases: org/x must be the name of one model alone",
        ),
        (MANY + TENANT + "models = 5\n", "tenants.ann.models must be a list of the names of models, not 5"),
        (MANY.replace("max_rows = 16", "rows = 1") + TENANT, "there is no setting models.large.engine.rows"),
        (MANY.replace('"2GiB"', '"2 loaves"') + TENANT, "pool.memory"),
        (MODEL + "models = {}\n" + TENANT, "models must be 1 to 256 tables [models.NAME]"),
    ],
)
def test_a_mistake_about_many_models_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        loaded(tmp_path, text)


PREFIXES = """
[prefixes.one]
system = "Be brief."
[prefixes.two]
tokens = [1, 2]
"""


def test_prefixes_are_those_of_the_models_that_they_name(tmp_path: Path) -> None:
    assert loaded(tmp_path, MODEL + PREFIXES + TENANT).prefixes == (
        NamedPrefix("one", system="Be brief."),
        NamedPrefix("two", token_ids=(1, 2)),
    )
    settings = loaded(tmp_path, MANY + PREFIXES + 'models = ["large"]\n' + TENANT)
    names = {model: [prefix.name for prefix in spec.prefixes] for model, spec in settings.models.items()}
    assert names == {"small": ["one"], "large": ["one", "two"]}
    assert settings.prefixes == ()
    # Another order in the file is not another setting: otherwise a reload would open a second engine.
    one, two = PREFIXES.split("[prefixes.two]")
    for kind in (MODEL, MANY):
        as_is, turned = (loaded(tmp_path, kind + said + TENANT) for said in (PREFIXES, f"[prefixes.two]{two}{one}"))
        assert (turned.prefixes, turned.models) == (as_is.prefixes, as_is.models)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL + PREFIXES.replace("system", "text") + 'text = "a"\n' + TENANT, "set either text, system or tokens"),
        (MODEL + PREFIXES.replace("[1, 2]", "[]") + TENANT, "set either text, system or tokens"),
        (MODEL + PREFIXES.replace("[1, 2]", "[1, true]") + TENANT, "prefixes.two.tokens must be a list of tokens, not"),
        (MODEL + PREFIXES.replace(".two", '."a b"') + TENANT, "a prefix's name must be 1 to 64 letters, digits and"),
        (MODEL + PREFIXES + 'models = ["x"]\n' + TENANT, "prefixes.two.models: there is no [models.x]"),
        (MANY + PREFIXES + "models = []\n" + TENANT, "prefixes.two.models must name at least one model, not []"),
        (MODEL + PREFIXES + "models = []\n" + TENANT, "prefixes.two.models must name at least one model, not []"),
        (MODEL + "[prefixes]\n" + TENANT, "prefixes must be 1 to 64 tables [prefixes.NAME]"),
    ],
)
def test_a_mistake_about_prefixes_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        loaded(tmp_path, text)


def test_a_key_in_the_place_of_its_hash_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        loaded(tmp_path, MODEL + TENANT.replace(DIGEST, KEY))
    assert KEY not in str(refused.value)


def test_a_key_s_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    text = MODEL + TENANT.replace(f'key_sha256 = "{DIGEST}"', 'key_file = "key"')
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o640)
    with pytest.raises(InvalidRequest, match="Chmod 600"):
        loaded(tmp_path, text)
    file.chmod(0o600)
    assert loaded(tmp_path, text).keys.tenant(f"Bearer {KEY}") == "ann"
    file.write_text("short")
    with pytest.raises(InvalidRequest, match="must contain a key of 16"):
        loaded(tmp_path, text)


def test_the_page_s_key_is_the_operator_s(tmp_path: Path) -> None:
    path = tmp_path / "decode.toml"
    path.write_text(MODEL + TENANT)
    assert load_decode_settings(path).operator_digest is None
    path.write_text(f'{MODEL}{TENANT}\n[operator]\nkey_sha256 = "{"ab" * 32}"\n')
    assert load_decode_settings(path).operator_digest == bytes.fromhex("ab" * 32)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Opening a FIFO would wait for a writer."""
    os.mkfifo(tmp_path / "key")
    text = MODEL + TENANT.replace(f'key_sha256 = "{DIGEST}"', 'key_file = "key"')
    with pytest.raises(InvalidRequest, match=r"key_file .*key: it must be a regular file, not a folder"):
        loaded(tmp_path, text)
    with pytest.raises(InvalidRequest, match="key: it must be a regular file, not a folder"):
        load_decode_settings(tmp_path / "key")
