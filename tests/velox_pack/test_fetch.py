"""The Hub, spoken to by the unchanged client over loopback: what is fetched and what is refused."""

import errno
import logging
from types import SimpleNamespace

import mlx_lm
import pytest
from huggingface_hub import constants

from hub import Hub
from models import edit_config
from velox_pack import fetch as fetch_module
from velox_pack.manifests.errors import SourceError, VeloxError
from velox_pack.source import resolve

REPO = "org/tiny"


def refused(source: str, **options: object) -> str:
    """Return the message with which a repo is refused: always one line."""
    with pytest.raises(SourceError) as caught:
        resolve(source, **options).check_weights()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_a_repo_is_fetched_once(hub: Hub, tiny_model, capfd) -> None:
    folder = tiny_model("qwen2", shards=2)
    commit = hub.add(REPO, folder)
    said: list[str] = []
    source = resolve(REPO, report=said.append)
    assert (source.kind, source.name, source.repo, source.revision) == ("hub", "tiny", REPO, commit)
    source.check_weights()
    assert source.hashes() == resolve(str(folder)).hashes()
    assert len(said) == 2
    assert REPO in said[1]
    asked = len(hub.requests)
    again = resolve(REPO, commit)
    assert again == source
    assert not any(path.endswith(".safetensors") for path in hub.requests[asked:])
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_only_what_is_needed_is_fetched(hub: Hub, tiny_model) -> None:
    files = {p.name: p.read_bytes() for p in tiny_model().iterdir()}
    extra = ("LICENSE", "README.md", "evil.py", "pytorch_model.bin", "model.gguf", "flax.msgpack")
    hub.add(REPO, files | dict.fromkeys(extra, b"?"))
    source = resolve(REPO)
    names = {p.name for p in source.path.iterdir()}
    assert names == files.keys() | {"LICENSE", "README.md"}


def test_revisions(hub: Hub, tiny_model) -> None:
    first = hub.add(REPO, tiny_model(seed=1))
    hub.add(REPO, tiny_model(seed=2))
    hub.add(REPO, tiny_model(seed=3), branch="v3")
    digests = {resolve(REPO, r).hashes()["model.safetensors"] for r in (first, None, "v3")}
    assert len(digests) == 3
    assert resolve(REPO, first).revision == first
    assert "has no revision 'v4'" in refused(REPO, revision="v4")


def test_no_such_repo(hub: Hub, monkeypatch) -> None:
    assert "no such model on the Hub" in refused("org/nothing")
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    assert "no such model on the Hub" in refused("org/nothing")
    assert "neither a folder here nor a repo id" in refused("org/--bad..name--")


def test_private_repo(hub: Hub, tiny_model, monkeypatch) -> None:
    hub.add(REPO, tiny_model(), private=True)
    assert "or it is private" in refused(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    resolve(REPO).check_weights()


def test_gated_repo(hub: Hub, tiny_model, monkeypatch) -> None:
    hub.add(REPO, tiny_model(), gated=True)
    for token in ("", "hf_user"):
        monkeypatch.setenv("HF_TOKEN", token)
        message = refused(REPO)
        assert "is gated: accept its terms" in message
        assert "hf auth login" in message
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    resolve(REPO).check_weights()


def test_a_wrong_token_is_never_shown(hub: Hub, tiny_model, monkeypatch, capfd) -> None:
    hub.add(REPO, tiny_model())
    monkeypatch.setenv("HF_TOKEN", "hf_secret123")
    message = refused(REPO)
    assert "refused the login (401)" in message
    assert "hf_secret123" not in message + "".join(capfd.readouterr())


CUTS = ["offline mode", "no network", "Hub down"]


def cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "no network":
        nobody = "http://127.0.0.1:9"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(hub.url, nobody)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", nobody)
    else:
        hub.broken = 503


@pytest.mark.parametrize("how", CUTS)
def test_no_network_and_not_cached(hub: Hub, monkeypatch, how: str) -> None:
    cut_off(hub, monkeypatch, how)
    said = "HTTP status 503" if how == "Hub down" else "the Hub cannot be reached"
    assert said in refused(REPO)


@pytest.mark.parametrize("how", CUTS)
def test_the_cache_works_without_network(hub: Hub, tiny_model, monkeypatch, how: str) -> None:
    commit = hub.add(REPO, tiny_model())
    resolve(REPO)
    cut_off(hub, monkeypatch, how)
    source = resolve(REPO)
    assert source.revision == commit
    source.check_weights()


def test_a_cache_filled_by_others_lacks_licences_only(hub: Hub, tiny_model, monkeypatch) -> None:
    files = {p.name: p.read_bytes() for p in tiny_model().iterdir()}
    hub.add(REPO, files | {"LICENSE": b"MIT"})
    mlx_lm.load(REPO)
    assert not hub.sent("LICENSE")
    cut_off(hub, monkeypatch, "no network")
    assert "LICENSE" not in resolve(REPO).hashes()


@pytest.mark.parametrize("how", CUTS)
def test_incomplete_cache(hub: Hub, tiny_model, monkeypatch, how: str) -> None:
    hub.add(REPO, tiny_model(shards=2))
    source = resolve(REPO)
    cut_off(hub, monkeypatch, how)
    for missing in (source.weight_files[1], source.path / "config.json"):
        missing.resolve().unlink()  # the blob
        missing.unlink()
        assert "cached copy is incomplete" in refused(REPO)


def test_a_hopeless_model_is_refused_before_its_weights_travel(hub: Hub, own_model) -> None:
    hub.add(REPO, edit_config(own_model(), model_type="bert", architectures=["BertForMaskedLM"]))
    assert "an encoder for masked words" in refused(REPO)
    assert not hub.sent(".safetensors")


def test_a_repo_of_other_formats(hub: Hub, tiny_model) -> None:
    files = {p.name: p.read_bytes() for p in tiny_model().iterdir()}
    weights = files.pop("model.safetensors")
    hub.add("org/torch", files | {"pytorch_model.bin": weights})
    assert "only pytorch_model.bin: convert to safetensors first" in refused("org/torch")
    hub.add("org/gguf", {"README.md": b"", "m-Q4.gguf": weights})
    assert "only GGUF: convert to safetensors first" in refused("org/gguf")


def test_disk_too_small(hub: Hub, tiny_model, monkeypatch) -> None:
    hub.add(REPO, tiny_model())
    monkeypatch.setattr(fetch_module, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "1,000 free" in refused(REPO)
    assert not hub.sent("tokenizer.json")


def test_disk_fills_up(hub: Hub, monkeypatch) -> None:
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_module, "snapshot_download", full)
    assert "the disk filled up" in refused(REPO)


def test_the_clients_log_level_is_left_as_it_was(hub: Hub, tiny_model) -> None:
    hub.add(REPO, tiny_model())
    before = logging.getLogger("huggingface_hub").level
    resolve(REPO)
    assert logging.getLogger("huggingface_hub").level == before


def test_source_errors_are_velox_errors() -> None:
    assert issubclass(SourceError, VeloxError)
