"""What a user sees if something goes wrong: one line, exit status 1, and no traceback."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import checkpoints
from attacks import module, sparse
from finegrained_kernels import cli
from finegrained_kernels.checkpoint import CheckpointError, compress, inspect, push, verify
from model_hub import ModelHub

pytestmark = pytest.mark.usefixtures("bundle")


@pytest.fixture(scope="module")
def made(bundle, tmp_path_factory):
    root = tmp_path_factory.mktemp("errors")
    source = checkpoints.write_checkpoint(
        root / "source", checkpoints.random_moe(), checkpoints.MODELOPT_CONFIG, shard_of=checkpoints.by_layer
    )
    (source / "hf_quant_config.json").write_text(json.dumps(checkpoints.HF_QUANT_CONFIG))
    compress(source, root / "small")
    return root


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


def refused(*arguments: object) -> str:
    """The one line that the command prints on stderr."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    lines = [line for line in result.stderr.splitlines() if line.strip() and "\r" not in line and "━" not in line]
    errors = [line for line in lines if line.startswith("error: ")]
    assert result.exit_code == 1 and len(errors) == 1 and lines[-1] == errors[0], (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return errors[0]


class Answer(BaseHTTPRequestHandler):
    """Answers all requests alike."""

    status, body, drops = 500, b"", False

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""

    def answer(self) -> None:
        if self.drops:
            self.connection.close()
            return
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_HEAD = do_POST = do_PUT = answer


@pytest.fixture
def hub(monkeypatch):
    """A function that makes every request to the hub fail in one way."""
    servers = []

    def fail(how: str) -> None:
        url = {"dead port": "http://127.0.0.1:9", "unknown host": "http://no-such-host.invalid"}.get(how)
        if url is None:
            options = {
                "error 500": {},
                "HTML": {"status": 200, "body": b"<html>Sign in to the network</html>"},
                "JSON that is no model": {"status": 200, "body": b"[]"},
                "dropped connection": {"drops": True},
            }[how]
            server = ThreadingHTTPServer(("127.0.0.1", 0), type("How", (Answer,), options))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            url = f"http://127.0.0.1:{server.server_port}"
        from huggingface_hub import constants, hf_api

        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(hf_api.constants, "ENDPOINT", url)
        monkeypatch.setattr("time.sleep", lambda _: None)  # between retries

    yield fail
    for server in servers:
        server.shutdown()
        server.server_close()


WAYS = ["dead port", "unknown host", "error 500", "HTML", "JSON that is no model", "dropped connection"]


@pytest.mark.parametrize("how", WAYS)
def test_a_hub_that_is_none(made, hub, how):
    hub(how)
    assert "org/name" in refused("inspect", "org/name")
    assert "org/name" in refused("push", made / "small", "org/name")


@pytest.mark.parametrize("name", ["nope/", "nope", "./nope", "a/b/c", "org/na me", "~/x", "", "org/\nname"])
def test_names_that_are_neither_directory_nor_repository(name):
    assert "neither a directory nor a hub id (org/name)" in refused("inspect", name)


@pytest.mark.parametrize("name", ["a/b/c", "org/na me", "-x/y", "..", "org/name.git"])
def test_repositories_that_cannot_be(made, name):
    with pytest.raises(CheckpointError) as caught:
        push(made / "small", name)
    assert str(caught.value).isprintable()


def test_a_hub_repository_without_a_config_does_not_take_ours(made, run_python, tmp_path):
    """The working directory may have an unrelated config.json."""
    (tmp_path / "config.json").write_text("not read")
    code = "from finegrained_kernels.checkpoint import inspect; print(inspect('org/bare').shards)"
    with ModelHub("org/bare") as server:
        server.files["model.safetensors"] = (made / "source" / "model-00001-of-00003.safetensors").read_bytes()
        assert run_python(code, HF_ENDPOINT=server.url).stdout == "1\n"


@pytest.mark.parametrize("command", ["compress", "quantize", "restore"])
def test_a_source_that_is_not_there(tmp_path, command):
    assert "is not a directory" in refused(command, tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fault_of_the_whole_checkpoint_names_no_file_in_it(tmp_path):
    result = CliRunner().invoke(cli.app, ["verify", str(tmp_path / "absent")])
    assert result.exit_code == 1 and result.stdout.startswith(f"fault: {tmp_path / 'absent'} is not a directory")


ODD = [None, [], "text", 3, [["x"]], {"quant_method": 7}, {"quantized_layers": [1]}, {"quantized_layers": {"x": 1}}]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_odd_quantization_configs(source, tmp_path, value):
    checkpoints.edit_json(source / "config.json", lambda config: config.update(quantization_config=value))
    for call, *arguments in ((compress, tmp_path / "out"), (inspect,), (verify,)):
        try:
            call(source, *arguments)
        except CheckpointError as error:
            assert str(error).isprintable() and "json" in str(error)


@pytest.mark.parametrize(
    "text", ["null", "[]", '"x"', '{"quantization": null}', '{"quantization": [1]}', "{", "\ufeff{}"]
)
def test_odd_hf_quant_configs(source, tmp_path, text):
    (source / "hf_quant_config.json").write_text(text)
    try:
        compress(source, tmp_path / "out")
    except CheckpointError as error:
        assert str(error).isprintable() and "hf_quant_config.json" in str(error)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
def test_half_of_a_unicode_character(source, tmp_path, file):
    checkpoints.edit_json(source / file, lambda document: document.update({"\ud800": "\ud800"}))
    assert f"{file}: cannot be read: it has half of" in refused("compress", source, tmp_path / "out")


def test_devices_that_hold_no_bytes(source, tmp_path):
    assert "expected cpu or cuda" in refused("compress", source, tmp_path / "out", "--device", "meta")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a[/red]b", "a[/red]b"), ("a[bold]b", "a[bold]b"), ("a\nb", "a\\nb"), ("\x1b[31mb", "\\x1b[31mb")],
)
def test_names_are_shown_as_they_are(tmp_path, name, shown):
    """Brackets used to be taken for markup, which ended in a traceback, and escape sequences reached the terminal."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    sparse(source / "model.safetensors", module(f"model.{name}.up_proj", 16, 2))
    for command in (["inspect", "--layers", source], ["compress", source, tmp_path / "out"]):
        result = CliRunner().invoke(cli.app, [str(argument) for argument in command])
        assert result.exit_code == 0, (result.output, result.exception)
        assert f"model.{shown}" in result.stdout and "\x1b[31m" not in result.output
