"""A secret runs through everything that leaves the driver, in every form we know of, and is in none of it."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sparkring.conf.blocks.tracking import TrackingConfig
from sparkring.conf.config import RunConfig
from sparkring.conf.load import ConfigError, leaves, load_config
from sparkring.conf.manifest import Column
from sparkring.conf.recipes import recipe_names
from sparkring.conf.secrets import HIDDEN, RedactingFormatter, is_secret_name, redact, redacted
from sparkring.conf.storage import open_storage
from sparkring.pipelines import cli
from sparkring.pipelines.cli.commands import recipes
from sparkring.pipelines.context.etl_step import Dataset
from sparkring.pipelines.job import job as job_module
from sparkring.pipelines.job import train_step
from sparkring.pipelines.job.progress import ProgressDisplay
from sparkring.pipelines.run.spark_settings import session_settings
from sparkring.pipelines.tracking.ops import DatasetInfo
from sparkring.pipelines.tracking.params import flat_params
from sparkring.pipelines.tracking.tracker import JOB, Tracker
from sparkring.training.launch.failure import Failure, WorkerFailed
from sparkring.training.launch.messages import AttemptEnded
from sparkring.training.launch.topology import Child
from sparkring.training.model.folder import describe_model
from tests.helpers.datasets import manifest_of
from tests.pipelines.results import train_result

PLAIN, ODD = "hunter2Zq9", "hunter2Zq9/Sl4sh+x"  # the second as AWS makes them
ABFSS = "abfss://container@account.dfs.core.windows.net/x"
MANIFEST = manifest_of(name="s")

URLS = [  # none has a place in a recipe
    f"s3://AKIAIOSFODNN7EXAMPLE:{ODD}@bucket/x",
    f"s3://key:{PLAIN}@bucket/x",
    f"https://{PLAIN}@host/x",
    f"https://user:p@{PLAIN}@host/x",
    f"abfss://:{PLAIN}@account/container",
    f"{ABFSS}?client_secret={PLAIN}",
    f"{ABFSS}?sv=2024-11-04&sig={PLAIN}%3D",
    f"{ABFSS}?account_key={ODD}",
    f"{ABFSS}?sas_token=sv=2024%26sig={PLAIN}",
    f"gs://bucket/x?access_token={PLAIN}",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential=AKIA&X-Amz-Signature={PLAIN}",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Security-Token={PLAIN}",
    f"https://bucket.s3.amazonaws.com/x?AWSAccessKeyId=a&Signature={PLAIN}",
    f"https://storage.googleapis.com/x?X-Goog-Signature={PLAIN}",
    f"https://host/x?%73ig={PLAIN}",
    f"https://host/x?key={PLAIN}",
    f"https://host/x#access_token={PLAIN}",
    f"simplecache::s3://key:{ODD}@bucket/x",
    f"zip://a.csv::https://user:{PLAIN}@host/x.zip",
    f"hdfs://user:{PLAIN}@host:9000/x",
    f"postgresql://user:{ODD}@db:5432/mlflow",
    f"mysql+pymysql://root:{PLAIN}@db/mlflow",
    f"jdbc:postgresql://db/x?user=u&password={PLAIN}",
    f"jdbc:sqlserver://db;user=sa;password={PLAIN}",
    f"jdbc:oracle:thin:scott/{PLAIN}@//db:1521/x",
    f"https://host?token={PLAIN}",
    f"https://host/x?auth_key={PLAIN}",
    f"https://host/x;jsessionid={PLAIN}",
    f"https://host/x?client_assertion={PLAIN}",
    f"https://hooks.slack.com/services/T00/B00/{PLAIN}",
    f"//user:{PLAIN}@host/x",
]
WORDS = [  # in a message, a log line or a tag
    f"password={PLAIN}",
    f"client_secret: {ODD}",
    f'{{"api_key": "{PLAIN}"}}',
    f"{{'secretAccessKey': '{ODD}'}}",
    f'{{\\"token\\": \\"{PLAIN}\\"}}',
    f"spark.hadoop.fs.s3a.secret.key={ODD}",
    f"fs.azure.account.key.acc.dfs.core.windows.net={ODD}",
    f"fs.azure.sas.container.acc = {PLAIN}",
    f"Authorization: Bearer {PLAIN}",
    f"Authorization: Basic {PLAIN}",
    f"-H bearer {PLAIN}",
    f"--password {PLAIN}",
    f"-Djavax.net.ssl.trustStorePassword={PLAIN}",
    f"AccountName=a;AccountKey={ODD};EndpointSuffix=core.windows.net",
    f"DB_PASSWD={PLAIN}",
    f"ghp_{PLAIN}{'a' * 20}",
    f"eyJhbGciOiJIUzI1NiJ9.{PLAIN}.c2ln",
    f"npm_{PLAIN}{'A' * 26}",
    f"DB_PASS={PLAIN}",
    f"-Ddb.pass={PLAIN} -Dmy-pass={PLAIN}",
    f"aws_secret_access_key\t{ODD}",
    f"Cookie: a={PLAIN}; b={PLAIN}",
    f"cookie={PLAIN}",
    f"bearer: {PLAIN}",
    f"sessionid={PLAIN}",
    f"curl -s -u 'user:{PLAIN}' https://host",
    f"curl --user user:{ODD} https://host",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PLAIN}\n-----END RSA PRIVATE KEY-----",
]
KEYS = ["storage.runs", "storage.datasets", "dataset", "tracking.uri", "tracking.root", "tracking.experiment",
        "tracking.tags.note", "model.args.weights", "data.cache.files", "launch.interface", "description"]  # fmt: skip
NAMED = ["tracking.tags.api_token", "tracking.tags.password", "model.args.hf_token", "model.args.secret_key",
         "tracking.tags.pass", "tracking.tags.DB_PASS", "tracking.tags.db-pass", "tracking.tags.bearer",
         "tracking.tags.session_cookie",
         "model.args.client_assertion", "model.args.authKey"]  # fmt: skip
SPARK = {  # theirs are kept for the session
    "spark.hadoop.fs.s3a.secret.key": ODD,
    "spark.hadoop.fs.s3a.access.key": PLAIN,
    "spark.hadoop.fs.azure.account.key.acc.dfs.core.windows.net": ODD,
    "spark.hadoop.fs.azure.account.oauth2.client.secret": PLAIN,
    "spark.hadoop.fs.azure.sas.container.acc": PLAIN,
    "spark.hadoop.fs.gs.auth.service.account.private.key": PLAIN,
    "spark.ssl.keyPassword": PLAIN,
    "spark.authenticate.secret": PLAIN,
    "spark.kubernetes.authenticate.oauthToken": PLAIN,
    "spark.kafka.sasl.jaas.config": f"x required username=u password={PLAIN};",
    "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:postgresql://u:{PLAIN}@db/x",
    "spark.executor.extraJavaOptions": f"-Dtoken={PLAIN}",
}


def shown(text: str) -> bool:
    return PLAIN in text or "Sl4sh" in text


def recipe(folder: Path, key: str, value: Any) -> str:
    content: dict[str, Any] = {"name": "s", "dataset": "/data/x"}
    *above, name = key.split(".", 2) if key.startswith("spark.conf") else key.split(".")
    block = content
    for part in above:
        block = block.setdefault(part, {})
    block[name] = value
    (folder / "s.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "s.yaml")


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_secret_is_refused_wherever_it_stands_and_not_repeated(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in KEYS:
        said = "experiment = .* names a folder" if key == "tracking.experiment" else f"{key}.* holds a secret"
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(recipe(tmp_path, key, url))
        assert not shown(repr(caught.value)) and len(caught.value.problems) == 1
    assert cli.main(["-v", "config", "show", recipe(tmp_path, "dataset", url)]) == 2
    captured = capsys.readouterr()
    assert "holds a secret" in captured.err and not shown(captured.err + captured.out)
    with pytest.raises(ValueError, match="holds a secret") as refused:
        open_storage(url)
    assert not shown(str(refused.value))


@pytest.mark.parametrize("key", NAMED)
def test_a_key_that_names_a_secret_is_refused_where_users_name_keys(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key} is a secret") as caught:
        load_config(recipe(tmp_path, key, PLAIN))
    assert not shown(str(caught.value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.conf", f"spark.hadoop.fs.s3a.secret.key={ODD}"),
        ("spark.conf", {"spark.x.password": [PLAIN]}),
        ("spark.conf", {"spark.x.secret": {"a b": PLAIN}}),
        ("spark.conf", {"spark.x.secret": {"a": {"b": [PLAIN]}}}),
        ("tracking.tags", {"password": {"is": PLAIN}}),
        ("tracking.tags", f"password: {PLAIN}"),
        ("tracking.flush_every_s", URLS[0]),
        ("optim.lr", f"token={PLAIN}"),
    ],
)
def test_a_value_of_the_wrong_type_is_not_repeated(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, key, value))
    assert key.split(".")[1] in str(caught.value) and not shown(str(caught.value))
    with pytest.raises(ValidationError) as raw:
        RunConfig.model_validate(yaml.safe_load((tmp_path / "s.yaml").read_text()))
    assert not shown(str(raw.value))


@pytest.mark.parametrize("value", [{"a": PLAIN}, [PLAIN]])
def test_a_refusal_names_the_key_as_the_user_wrote_it_and_once(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, "spark.conf", {"spark.secret": value}))
    (problem,) = caught.value.problems
    assert problem.startswith("spark.conf.spark.secret = ") and ": input should be a valid string (" in problem
    assert HIDDEN in problem and not shown(problem)


@pytest.mark.parametrize("text", [f"a: [password: {PLAIN}", f"password: {PLAIN}\npassword: b", f"a: *{PLAIN}"])
def test_a_recipe_that_is_no_yaml_is_not_repeated(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "s.yaml"), [f"tracking.tags={{token: {PLAIN}"])
    assert not shown(str(caught.value)) or text.startswith("a: *")  # an alias: no form of a secret


def test_spark_gets_its_secrets_and_nothing_else_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, "spark.conf", SPARK | {"spark.executor.cores": "2"})
    resolved = load_config(path)
    config = resolved.config
    assert session_settings("s", config.spark, 1, is_submitted=False).items() >= SPARK.items()
    describe_model(open_storage(str(tmp_path / "model")), config, MANIFEST)
    dataset = Dataset(MANIFEST, open_storage(str(tmp_path)))
    job = train_step.job_spec(resolved, dataset, dataset.folder)
    assert cli.main(["config", "show", path]) == 0
    left = [repr(config), str(config), config.model_dump_json(), repr(job), json.dumps(job.checked_payload())]
    left.append(capsys.readouterr().out)
    left += [(tmp_path / "model/config.json").read_text(), train_result(config=resolved.as_dict()).to_json().decode()]
    assert not [text for text in left if shown(text)]
    assert resolved.as_dict()["spark"]["conf"] == dict.fromkeys(SPARK, HIDDEN) | {"spark.executor.cores": "2"}
    assert RunConfig.model_validate(job.checked_payload()["config"]).model_dump(mode="json") == resolved.as_dict()
    assert load_config(recipe(tmp_path, "spark.conf", SPARK | {"spark.ssl.keyPassword": "other"})).digest


def test_sparks_own_rule_can_be_changed(tmp_path: Path) -> None:
    conf = {"spark.redaction.regex": "(?i)special", "spark.my.special": PLAIN, "spark.note": "special " + PLAIN}
    dumped = load_config(recipe(tmp_path, "spark.conf", conf)).as_dict()["spark"]["conf"]
    assert dumped == conf | {"spark.my.special": HIDDEN, "spark.note": HIDDEN}
    with pytest.raises(ConfigError, match="no regular expression"):
        load_config(recipe(tmp_path, "spark.conf", {"spark.redaction.regex": "("}))


def away(root: Path, **changes: Any) -> TrackingConfig:
    """Tracking whose server does not answer."""
    return TrackingConfig(experiment="t", uri="http://127.0.0.1:9", root=str(root), request_retries=0, **changes)


def test_nothing_tracked_holds_a_secret(tmp_path: Path) -> None:
    """What the store gets is what is in the journal; here its server is away."""
    settings = away(tmp_path, tags={"note": WORDS[0]})
    texts = [*URLS, *WORDS]
    with Tracker(settings, "j", "n", {"password": PLAIN}) as tracker:
        events = train_step.Events(tracker, ProgressDisplay(interactive=False), open_storage(str(tmp_path)))
        with tracker.part("train"):
            for number, text in enumerate(texts):
                tracker.params("train", {f"k{number}": {"text": text, "list": [text]}, "api_token": PLAIN})
                tracker.tags("train", {f"t{number}": text})
                tracker.artifact("train", f"before\n{text}\nafter", "log.txt")
                info = DatasetInfo(name="d", uri=text, fingerprint="f", profile={"password": PLAIN}, schema=[])
                tracker.dataset("train", info, "training")
                tracker.checkpoint("train", number, text, 1, 1)
                events.on_event(AttemptEnded(number, 1, "exception", text, 1, 0, "retry", 1, why=text))
    written = [path.read_bytes().decode() for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(len(text) for text in written) > 10_000 and not [text for text in written if shown(text)]
    assert len(events.failed_attempts) == len(texts) and not shown(repr(events.failed_attempts))
    assert not shown(json.dumps(redacted({"words": texts, "token": PLAIN, "list": [{"password": [PLAIN]}]})))


def test_names_of_columns_and_sql_are_no_secrets_and_json_stays_json(tmp_path: Path) -> None:
    """Of a configuration with secrets, in everything of it that goes to MLflow."""
    columns = {"id": "int", "n_token": "int", "api_key_uses": "int", "password": "string"}
    view = "SELECT * FROM token WHERE token = 'abc' AND password='x' -- see https://host/x#y"
    etl = {
        "sources": {"token": {"path": "/d/t.csv", "columns": columns}}, "views": {"secret_view": view},
        "rows": "secret_view", "key": ["id"], "label": "id",
        "checks": [{"name": "token_known", "kind": "expression", "sql": "token = 'abc'"}],
        "features": {"n_token": {"kind": "numeric"}, "api_key_uses": {"kind": "numeric"}},
    }  # fmt: skip
    content = {"name": "s", "etl": etl, "spark": {"conf": SPARK}, "model": {"args": {"n_token": 512}}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content))
    resolved = load_config(str(tmp_path / "s.yaml"))
    checks = [{"rule": "token", "sql": "token = 'abc'"}]
    manifest = MANIFEST.model_copy(update={"columns": (Column(name="n_token", dtype="int64"),)})
    settings = away(tmp_path / "mlflow")
    with Tracker(settings, "j", "n") as tracker:
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(applicationId="a"))
        job_module.describe_job(tracker, resolved, spark, "f")
        tracker.artifact_json(JOB, checks, "checks.json", "etl")
        tracker.artifact_json(JOB, manifest.model_dump(mode="json"), "manifest.json", "etl")
        tracker.artifact_json(JOB, {"password": PLAIN, "url": URLS, "words": WORDS}, "words.json")
    stored = {path.name: json.loads(path.read_bytes()) for path in tmp_path.rglob("files/*/*.json")}
    assert stored["config.json"] == resolved.as_dict() and stored["checks.json"] == checks
    assert stored["manifest.json"] == manifest.model_dump(mode="json") and not shown(repr(stored["words.json"]))
    (journal,) = tmp_path.rglob("ops.jsonl")
    (params,) = (op["params"] for op in map(json.loads, journal.read_text().splitlines()) if op["op"] == "params")
    whole = flat_params(resolved.as_dict())
    assert {name: whole[f"etl.sources.token.columns.{name}"] for name in columns} == columns
    assert whole["etl.views.secret_view"] == view and params["model.args.n_token"] == "512"
    assert params["spark.conf.spark.ssl.keyPassword"] == HIDDEN and not shown(journal.read_text())


@pytest.mark.parametrize("url", URLS)
def test_a_url_with_a_secret_is_refused_in_sql_and_sources_too(url: str, tmp_path: Path) -> None:
    source = {"path": url, "columns": {"id": "int"}}
    etl = {"sources": {"t": source}, "views": {"v": f"SELECT * FROM t -- {url}"}, "rows": "v", "key": ["id"]}
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, "etl", etl | {"label": "id", "features": {"x": {"kind": "numeric"}}}))
    said = str(caught.value)
    assert "etl.sources.t.path" in said and "etl.views.v" in said and not shown(said)


@pytest.mark.parametrize("text", [*URLS, *WORDS])
def test_no_log_line_and_no_error_shows_a_secret(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    log = logging.Logger("secrets")
    log.addHandler(handler)
    failure = WorkerFailed(
        Failure(Child("rank", 0), "h", "exception", text, traceback=text, last_lines=(text,)), (), {1: text}
    )
    log.info("[rank %d] before %s after", 0, text)
    try:
        raise failure
    except WorkerFailed:
        log.exception("ended")

    def fail(_: Any) -> None:
        raise failure

    monkeypatch.setattr(recipes, "_show", fail)
    assert cli.main(["-v", "config", "show", "flights"]) == 4
    captured = capsys.readouterr()
    for output in (stream.getvalue(), captured.err + captured.out):
        assert output.count(HIDDEN) >= 2 and not shown(output), output


@pytest.mark.parametrize("text", [
    "http://host:5000/users/@me", "http://[::1]:5000/@x", ABFSS, "hdfs://namenode:9000/x", "sample_tokens = 9: none",
    "tokens=512", "model.args.tokenizer: bpe", "launch.tls_key = 'a.pem'", "12:30:05 I train: loss 0.5, step 3",
    "pad_token_id=3", "s3://b/x?endpoint_override=host:9000&scheme=http", "sqlite:////data/mlflow.db", "databricks://me",
    "compass=north", "bypass: yes", "pass_rate=0.9", "token_count: 5", "forward_pass=3", "encompass: 1",
    "cookies: 5", "author_key", "hf_hospitalization_days", "npm_config_cache_min_age", "https://hooks.slack.com/docs",
    "curl -u https://host", "docker run -u 1000:1000", "primary_key\tint", "file:///data/a:b@c",
    "client_assertion_type=x", "all tests passed: 5",
])  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("name", ["compass", "bypass", "pass_rate", "token_count", "forward_pass", "cookies", "passes"])
def test_a_key_that_only_sounds_like_a_secret_is_none(name: str) -> None:
    assert not is_secret_name(name) and not is_secret_name(f"model.args.{name}")


@pytest.mark.parametrize("name", recipe_names())
def test_nothing_is_hidden_of_our_recipes(name: str) -> None:
    resolved = load_config(name).as_dict()
    assert redacted(resolved) == resolved and list(leaves(resolved))


@pytest.mark.parametrize(
    "rest", ["is not valid YAML", "the value is not valid YAML", "must be one of a, b", "has no file"]
)
def test_a_sentence_behind_the_name_of_a_secret_keeps_its_words(rest: str) -> None:
    assert redact(f"spark.conf.token: {rest}") == f"spark.conf.token: {rest}"
    for secret in ("is-not-4711", "is not4711", "isnot", "the sun4711", "hunter2"):
        assert "4711" not in redact(f"password: {secret}").split()[1] and "hunter2" not in redact(f"token={secret}")
