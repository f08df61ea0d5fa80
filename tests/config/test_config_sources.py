"""Where settings come from, who wins, and that nothing wrong is passed over."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SetupError
from services import config


def written(folder: Path, text: str) -> Path:
    file = folder / "kvrelay.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_are_the_documented_ones() -> None:
    settings = config.load(env={})
    assert settings == config.Settings()
    assert (settings.api.host, settings.api.port, settings.kv.block_tokens) == ("127.0.0.1", 8080, 64)


def test_later_sources_win_and_each_value_knows_its_source(tmp_path: Path) -> None:
    file = written(tmp_path, "[api]\nport = 1\nhost = 'a'\n[kv]\nttl_s = 1000\n[scheduler]\nmax_sequences = 3\n")
    env = {"KVRELAY_API_PORT": "2", "KVRELAY_SCHEDULER_MAX_SEQUENCES": "4", "PATH": "/bin"}
    loaded = config.read(file, env, {"api.port": 3, "kv.codec": None})
    assert loaded.settings.api.port == 3
    assert loaded.settings.api.host == "a"
    assert loaded.settings.kv.ttl_s == 1000.0
    assert loaded.settings.scheduler.max_sequences == 4
    assert loaded.sources["api.port"] == "command line"
    assert loaded.sources["api.host"] == str(file)
    assert loaded.sources["scheduler.max_sequences"] == "environment KVRELAY_SCHEDULER_MAX_SEQUENCES"
    assert loaded.sources["kv.codec"] == "default"


def test_file_is_found_by_variable_or_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "[api]\nport = 7\n")
    assert config.load(env={"KVRELAY_CONFIG": str(file)}).api.port == 7
    monkeypatch.chdir(tmp_path)
    assert config.load(env={}).api.port == 7
    assert config.load(env={"KVRELAY_CONFIG": ""}).api.port == 8080


@pytest.mark.parametrize("env", [{"KVRELAY_CONFIG": "/nowhere/a.toml"}, {}])
def test_a_file_that_was_asked_for_must_exist(env: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=r"/nowhere/a\.toml does not exist"):
        config.load(None if env else "/nowhere/a.toml", env)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kv]\nblock = 64", r"unknown key kv\.block in .*kvrelay\.toml; did you mean kv\.block_tokens\?"),
        ("[kvs]\nblock_tokens = 64", r"unknown group \[kvs\] in .*kvrelay\.toml; did you mean kv\?"),
        ("kv = 3", r"kv in .*kvrelay\.toml must be a table"),
        ("port = 3", r"unknown group \[port\]"),
        ("[api]\nport = '80'", r"api\.port = '80' \(from .*kvrelay\.toml\): Expected `int`, got `str`"),
        ("[api]\nport = 99999", r"api\.port = 99999 .*<= 65535"),
        ("[api]\nstrict = 1", r"api\.strict = 1 .*Expected `bool`"),
        ("[kv]\nblock_tokens = 24", r"kv\.block_tokens = 24 .*multiple of 16"),
        ("[kv]\nttl_s = nan", r"kv\.ttl_s = nan"),
        ("[kv]\nttl_s = inf", r"kv\.ttl_s = inf .*finite"),
        ("[kv]\ncodec = 'zip'", r"kv\.codec = 'zip'"),
        ("[kv\n", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        config.load(written(tmp_path, text), env={})


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_bytes(b"[compute]\nmodel = '\xff'\n")
    with pytest.raises(SetupError, match="cannot be read"):
        config.load(file, env={})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"KVRELAY_API_PROT": "1"}, "unknown environment variable KVRELAY_API_PROT; did you mean KVRELAY_API_PORT"),
        ({"KVRELAY_NONSENSE": ""}, "unknown environment variable KVRELAY_NONSENSE"),
        ({"KVRELAY_API_PORT": ""}, r"api\.port = '' \(from environment KVRELAY_API_PORT\)"),
        ({"KVRELAY_API_STRICT": "maybe"}, r"api\.strict = 'maybe'"),
        ({"KVRELAY_COMPUTE_CORES": "0-"}, r"compute\.cores = '0-'"),
        ({"KVRELAY_BUS_SYNC_INTERVAL": "often"}, r"bus\.sync_interval = 'often'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        config.load(env=env)


def test_an_unknown_override_is_named() -> None:
    with pytest.raises(SetupError, match=r"unknown key api\.prot in the command line"):
        config.load(env={}, overrides={"api.prot": 1})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"scheduler.chunk_tokens": 100}, r"chunk_tokens = 100 \(from command line\) must be a multiple of kv\.block_"),
        ({"kv.block_tokens": 512}, r"chunk_tokens = 256 \(from default\) must be a multiple of kv\.block_tokens = 512"),
        ({"scheduler.token_budget": 128}, r"token_budget = 128 .* must be at least scheduler\.chunk_tokens = 256"),
        ({"kv.partial_ttl_s": 1e6}, r"partial_ttl_s .* must be at most kv\.ttl_s"),
        ({"api.max_body_bytes": 8_388_608}, r"max_body_bytes .* must be below bus\.max_payload_bytes"),
        ({"bus.replicas": 3}, r"bus\.replicas = 3 .* needs a cluster"),
        ({"upstream.share": 0.5}, r"upstream\.share = 0\.5 .* needs the server of upstream\.url"),
        ({"upstream.fallback": True}, r"upstream\.fallback = True .* needs the server"),
    ],
)
def test_contradictions_are_named_with_both_keys(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        config.load(env={}, overrides=overrides)


@pytest.mark.parametrize(
    ("before", "now"), [(True, "always"), (False, "never"), ("True", "always"), ("false", "never")]
)
def test_store_generated_as_it_was_spelt_before(before: object, now: str, tmp_path: Path) -> None:
    assert config.load(env={}, overrides={"kv.store_generated": before}).kv.store_generated == now
    assert config.load(env={"KVRELAY_KV_STORE_GENERATED": str(before)}).kv.store_generated == now
    file = tmp_path / "kvrelay.toml"
    file.write_bytes(f"[kv]\nstore_generated = {str(before).lower()}\n".encode())
    assert config.load(file, env={}).kv.store_generated == now
    with pytest.raises(SetupError, match="store_generated"):
        config.load(env={}, overrides={"kv.store_generated": "sometimes"})


settings_values = st.fixed_dictionaries(
    {},
    optional={
        "compute.model": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
        "compute.cores": st.sampled_from(["", "0", "0,2-3", "1-4"]),
        "kv.data_dir": st.sampled_from(["a b", "日本", "/x=y"]),
        "kv.ttl_s": st.floats(min_value=600.0, max_value=1e9),
        "kv.max_bytes": st.integers(min_value=1_000_000, max_value=2**62),
        "kv.store_generated": st.sampled_from(["always", "conversation", "never"]),
        "api.strict": st.booleans(),
        "api.port": st.integers(min_value=0, max_value=65535),
        "bus.url": st.sampled_from(["", "nats://a:b@c:1,nats://d:2"]),
    },
)


@given(settings_values)
def test_a_child_loads_the_very_same_settings_from_its_environment(overrides: dict[str, object]) -> None:
    settings = config.load(env={}, overrides=overrides)
    env = config.to_env(settings, {"KVRELAY_API_PORT": "1", "KVRELAY_CONFIG": "/nowhere", "HOME": "/root"})
    assert config.load(env=env) == settings
    assert env["HOME"] == "/root"


def test_only_exporters_that_exist_can_be_asked_for() -> None:
    assert config.otel({}) == config.Otel("", "")
    assert config.otel({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}) == config.Otel("otlp", "otlp")
    assert config.otel({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}) == config.Otel("otlp", "")
    assert config.otel({"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none"}).traces == "console"
    assert config.otel({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}) == config.Otel("", "")
    with pytest.raises(SetupError, match="OTEL_TRACES_EXPORTER=zipkin"):
        config.otel({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(SetupError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc"):
        config.otel({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
