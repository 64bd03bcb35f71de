"""The model catalog: names to files, imports that are complete or refused, exports on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.common import MAX_IDENTIFIER_LENGTH
from apis.errors import CheckpointUnverified, Conflict, InvalidField, ModelInvalid, ModelNotFound
from apis.models import Models, RegisterModelRequest
from post_training.catalog.aliases import hub_id, same_model
from post_training.catalog.exporting import export_merged
from post_training.catalog.folders import RECORD, imported_folder, write_record
from post_training.catalog.importing import check_model, import_model
from post_training.catalog.models import ModelCatalog, checkpoint_identifier
from post_training.catalog.naming import MAX_FOLDER_NAME, folder_name
from post_training.jobs.database import Database

LLAMA = "meta-llama/Llama-3.2-3B-Instruct"
SKU = "Llama3.2-3B-Instruct"


def safetensors(path: Path, tensors: dict[str, list[float]]) -> None:
    """A safetensors file of fp64 vectors, written by hand from the format's description."""
    import struct

    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        packed = struct.pack(f"<{len(values)}d", *values)
        header[name] = {"dtype": "F64", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(packed)]}  # type: ignore[assignment]
        data += packed
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def model_folder(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    safetensors(directory / "model.safetensors", {"a": [value, 2.0], "b": [3.0]})
    return directory


def sharded(directory: Path) -> Path:
    model_folder(directory)
    (directory / "model.safetensors").unlink()
    safetensors(directory / "model-1.safetensors", {"a": [1.0]})
    safetensors(directory / "model-2.safetensors", {"b": [2.0]})
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def catalog(home: Path):
    database = Database(f"sqlite:///{home}/postgrad.db")
    database.migrate()
    yield ModelCatalog(database, home)
    database.close()


def imported(catalog: ModelCatalog, tmp_path: Path, model_id: str, value: float = 1.0) -> str:
    source = model_folder(tmp_path / f"source-{value}-{folder_name(model_id)}", value)
    return import_model(str(source), model_id, catalog.home, catalog.database)


def checkpoint(catalog: ModelCatalog, model: str, job: str, epoch: int = 0, *, completed: bool = False) -> str:
    identifier = checkpoint_identifier(model, job, epoch)
    step = 10 * (epoch + 1)
    directory = catalog.home / "jobs" / job / "checkpoints" / str(step)
    (directory / "adapter").mkdir(parents=True)
    (directory / "adapter" / "adapter_config.json").write_text("{}")
    base = catalog.resolve(model)
    with catalog.database.session() as session:
        catalog.add_checkpoint(
            session,
            identifier=identifier,
            job_uuid=job,
            epoch=epoch,
            step=step,
            directory=directory,
            model=model,
            base_identifier=base.base_identifier,
            base_dir=base.base_dir,
        )
    if completed:
        complete(catalog, job)
    return identifier


def complete(catalog: ModelCatalog, job: str) -> None:
    with catalog.database.session() as session:
        catalog.mark_job_completed(session, job)


# -- names -----------------------------------------------------------------------------------------------------------

_SEGMENT = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._:@-]{0,60}", fullmatch=True)
_IDENTIFIER = st.lists(_SEGMENT, min_size=1, max_size=4).map("/".join)


@given(_IDENTIFIER, _IDENTIFIER)
def test_no_two_ids_share_a_folder_even_where_case_does_not_count(one: str, other: str):
    if one != other:
        assert folder_name(one).lower() != folder_name(other).lower()


@given(_IDENTIFIER)
def test_a_folder_name_is_one_short_component_and_no_hidden_file(identifier: str):
    name = folder_name(identifier)
    assert 1 <= len(name) <= MAX_FOLDER_NAME
    assert Path(name).name == name
    assert not name.startswith(".")


def test_plain_ids_keep_their_name_and_others_get_a_hash():
    assert folder_name("smollm2-135m") == "smollm2-135m"
    assert folder_name("org/name:v1") == "org%2Fname%3Av1"
    # printf Foo | sha256sum
    assert folder_name("Foo") == "Foo+1cbec737f863e492"
    assert len(folder_name("a" * 255)) == MAX_FOLDER_NAME


def test_a_bad_id_has_no_folder():
    with pytest.raises(InvalidField):
        folder_name("../x")


def test_llama_stacks_names_stand_for_hub_ids():
    assert hub_id("Llama3.2-3B-Instruct") == "meta-llama/Llama-3.2-3B-Instruct"
    assert hub_id("Llama3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_id("Llama3.1-405B") == "meta-llama/Llama-3.1-405B"
    assert hub_id("Llama3.3-70B-Instruct") == "meta-llama/Llama-3.3-70B-Instruct"
    assert hub_id("Llama-3-8B") == "meta-llama/Meta-Llama-3-8B"
    assert hub_id("Llama-2-7b-chat") == "meta-llama/Llama-2-7b-chat-hf"
    assert hub_id("smollm2") == "smollm2"
    assert same_model(LLAMA) == (LLAMA, SKU)


def test_a_checkpoint_identifier_names_model_job_and_epoch():
    assert checkpoint_identifier(LLAMA, "job-7", 2) == f"{LLAMA}-sft-job-7-2"
    assert checkpoint_identifier("m", "j", 0, kind="dpo") == "m-dpo-j-0"


def test_a_checkpoint_identifier_over_the_limit_is_refused_before_the_job_starts():
    model = "m" * 200
    fits = "j" * (MAX_IDENTIFIER_LENGTH - len(f"{model}-sft--0"))
    assert len(checkpoint_identifier(model, fits, 0)) == MAX_IDENTIFIER_LENGTH
    with pytest.raises(InvalidField, match="256 characters") as raised:
        checkpoint_identifier(model, fits, 10)
    assert raised.value.param == "job_uuid"


# -- resolving -------------------------------------------------------------------------------------------------------


def test_a_base_model_resolves_to_its_folder(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "Base")
    found = catalog.resolve("Base")
    assert found.identifier == found.base_identifier == "Base"
    assert found.base_dir == imported_folder(catalog.home, "Base")
    assert found.adapter_dir is None
    assert found.merged_dir is None


@pytest.mark.parametrize(("has", "asked"), [(LLAMA, SKU), (SKU, LLAMA)])
def test_sku_names_and_hub_ids_are_one_model(catalog: ModelCatalog, tmp_path: Path, has: str, asked: str):
    imported(catalog, tmp_path, has)
    assert catalog.resolve(asked).identifier == has


def test_a_checkpoint_resolves_to_adapter_and_base(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    identifier = checkpoint(catalog, "base", "j1")
    found = catalog.resolve(identifier)
    assert identifier == found.identifier == "base-sft-j1-0"
    assert found.base_identifier == "base"
    assert found.base_dir == imported_folder(catalog.home, "base")
    assert found.adapter_dir == catalog.home / "jobs/j1/checkpoints/10/adapter"
    assert found.merged_dir is None
    (catalog.home / "jobs/j1/checkpoints/10/merged").mkdir()
    assert catalog.resolve(identifier).merged_dir == catalog.home / "jobs/j1/checkpoints/10/merged"


def test_upstreams_short_checkpoint_name_is_the_newest_completed_jobs(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, LLAMA)
    checkpoint(catalog, LLAMA, "first", 0)
    with pytest.raises(ModelNotFound):
        catalog.resolve(f"{LLAMA}-sft-0")  # not before the job is completed
    checkpoint(catalog, LLAMA, "second", 0)
    complete(catalog, "second")
    complete(catalog, "first")
    checkpoint(catalog, LLAMA, "third", 0)
    checkpoint(catalog, LLAMA, "fourth", 1, completed=True)
    for name in (f"{LLAMA}-sft-0", f"{SKU}-sft-0"):
        assert catalog.resolve(name).identifier == f"{LLAMA}-sft-first-0"
    assert catalog.resolve(f"{SKU}-sft-1").identifier == f"{LLAMA}-sft-fourth-1"
    with pytest.raises(ModelNotFound):
        catalog.resolve(f"{LLAMA}-dpo-0")


def test_a_jobs_model_named_by_sku_is_found_by_hub_id(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, LLAMA)
    identifier = checkpoint(catalog, SKU, "j", completed=True)
    assert identifier == f"{SKU}-sft-j-0"
    assert catalog.resolve(f"{LLAMA}-sft-0").identifier == identifier
    assert catalog.resolve(identifier).base_identifier == LLAMA


def test_training_on_from_a_checkpoint_keeps_the_first_base(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    first = checkpoint(catalog, "base", "j1", completed=True)
    second = checkpoint(catalog, first, "j2", completed=True)
    assert second == "base-sft-j1-0-sft-j2-0"
    assert catalog.resolve(second).base_identifier == "base"
    assert catalog.resolve(f"{first}-sft-0").identifier == second
    assert catalog.resolve("base-sft-0").identifier == first


def test_an_unknown_model_is_named_with_what_there_is_and_what_to_do(catalog: ModelCatalog, tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"there is none yet.*postgrad models import"):
        catalog.resolve("nope")
    for number in range(7):
        imported(catalog, tmp_path, f"m{number}", number)
    with pytest.raises(ModelNotFound, match=r"no model 'nope'; there is m0, m1, m2, m3, m4 and 2 more"):
        catalog.resolve("nope")


def test_a_model_whose_files_are_gone_is_said_to_be(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    (imported_folder(catalog.home, "base") / "config.json").unlink()
    with pytest.raises(ModelInvalid, match="files of model 'base' are gone") as raised:
        catalog.resolve("base")
    assert str(tmp_path) not in raised.value.message


def test_the_same_job_may_record_a_checkpoint_again_and_another_may_not(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    checkpoint(catalog, "base", "j")
    base = catalog.resolve("base").base_dir

    def again(job: str) -> None:
        with catalog.database.session() as session:
            catalog.add_checkpoint(
                session,
                identifier="base-sft-j-0",
                job_uuid=job,
                epoch=0,
                step=12,
                directory=catalog.home / "jobs/j/checkpoints/12",
                model="base",
                base_identifier="base",
                base_dir=base,
            )

    again("j")
    with pytest.raises(Conflict):
        again("other")
    with catalog.database.session() as session:
        catalog.remove_job(session, "j")
    with pytest.raises(ModelNotFound):
        catalog.resolve("base-sft-j-0")


@pytest.mark.parametrize("name", ["base-sft-99999999999999999999", "base-sft-²", "base" + "-sft-0" * 20_000])
def test_a_name_with_an_impossible_epoch_is_just_not_found(catalog: ModelCatalog, tmp_path: Path, name: str):
    imported(catalog, tmp_path, "base")
    with pytest.raises(ModelNotFound):
        catalog.resolve(name)


async def test_a_half_made_or_broken_import_is_no_model_and_hides_no_other(
    catalog: ModelCatalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    import_model(str(model_folder(tmp_path / "source")), "good", catalog.home)
    half = model_folder(catalog.home / "models" / ".half.tmp-1-abcd")
    write_record(half, "half")
    for number, content in enumerate((b"", b"{", b"\xff", b"[]", b'{"model_id": 7}', b'{"model_id": "../up"}')):
        broken = model_folder(catalog.home / "models" / f"broken{number}")
        (broken / RECORD).write_bytes(content)
    (catalog.home / "models" / "folder" / RECORD).mkdir(parents=True)
    assert [model.identifier for model in (await catalog.list_models()).data] == ["good"]
    assert "broken0" in caplog.text
    with pytest.raises(ModelNotFound):
        catalog.resolve("half")


# -- the models API --------------------------------------------------------------------------------------------------


async def test_the_list_has_base_models_then_checkpoints_then_other_names(catalog: ModelCatalog, tmp_path: Path):
    assert isinstance(catalog, Models)
    imported(catalog, tmp_path, "b")
    checkpoint(catalog, "b", "j1")
    imported(catalog, tmp_path, "a", 2.0)
    await catalog.register_model(RegisterModelRequest(model_id="mine", provider_model_id="b-sft-j1-0"))
    models = (await catalog.list_models()).data
    assert [model.identifier for model in models] == ["b", "a", "b-sft-j1-0", "mine"]
    assert models[2].metadata == {"base_model": "b", "job_uuid": "j1", "epoch": 0, "step": 10}
    assert models[3].provider_resource_id == "b-sft-j1-0"
    assert models[3].metadata["job_uuid"] == "j1"
    assert all(model.id == model.identifier and model.created > 1_700_000_000 for model in models)


async def test_an_other_name_resolves_and_can_be_forgotten(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    request = RegisterModelRequest(model_id="mine", provider_model_id="base", metadata={"team": "a"}, provider_id="p")
    registered = await catalog.register_model(request)
    assert registered == await catalog.register_model(request) == await catalog.get_model("mine")
    assert (registered.provider_id, registered.metadata) == ("p", {"team": "a"})
    assert catalog.resolve("mine").identifier == "base"
    with pytest.raises(Conflict, match="mine stands for 'base'"):
        await catalog.unregister_model("base")
    await catalog.unregister_model("mine")
    with pytest.raises(ModelNotFound):
        catalog.resolve("mine")
    with pytest.raises(ModelNotFound):
        await catalog.unregister_model("mine")


async def test_an_id_cannot_be_given_twice(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "a")
    imported(catalog, tmp_path, "b", 2.0)
    await catalog.register_model(RegisterModelRequest(model_id="x", provider_model_id="a"))
    for taken in ("x", "a"):
        with pytest.raises(Conflict, match=f"'{taken}' is taken"):
            await catalog.register_model(RegisterModelRequest(model_id=taken, provider_model_id="b"))
    with pytest.raises(Conflict):
        imported(catalog, tmp_path, "x", 3.0)
    with pytest.raises(ModelNotFound):
        await catalog.register_model(RegisterModelRequest(model_id="y", provider_model_id="nope"))
    with pytest.raises(InvalidField):
        await catalog.register_model(RegisterModelRequest(model_id="a", model_type="embedding"))
    with pytest.raises(InvalidField, match="must be a string"):
        await catalog.register_model(RegisterModelRequest(model_id="a", metadata={"provider_id": 7}))
    assert len((await catalog.list_models()).data) == 3


async def test_registering_upstreams_checkpoint_name_keeps_it_at_the_newest_job(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, SKU)
    checkpoint(catalog, SKU, "j1", completed=True)
    request = RegisterModelRequest(model_id=f"{SKU}-sft-0", metadata={"llama_model": LLAMA})
    registered = await catalog.register_model(request)
    assert registered.provider_resource_id == f"{SKU}-sft-j1-0"
    assert registered.metadata["llama_model"] == LLAMA
    checkpoint(catalog, SKU, "j2", completed=True)
    assert catalog.resolve(f"{SKU}-sft-0").identifier == f"{SKU}-sft-j2-0"


async def test_registering_a_known_id_adds_metadata(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    await catalog.register_model(RegisterModelRequest(model_id="base", metadata={"team": "a"}))
    assert (await catalog.get_model("base")).metadata == {"team": "a"}
    assert len((await catalog.list_models()).data) == 1


async def test_a_model_imported_by_another_process_is_found_and_stays_forgotten(catalog: ModelCatalog, tmp_path: Path):
    source = model_folder(tmp_path / "other")
    import_model(str(source), None, catalog.home)
    assert catalog.resolve("other").identifier == "other"
    await catalog.unregister_model("other")
    with pytest.raises(ModelNotFound):
        catalog.resolve("other")
    assert (imported_folder(catalog.home, "other") / "model.safetensors").exists()
    import_model(str(source), None, catalog.home)
    assert [model.id for model in (await catalog.list_models()).data] == ["other"]


# -- importing -------------------------------------------------------------------------------------------------------


def test_an_import_takes_what_belongs_to_a_model_and_nothing_else(home: Path, tmp_path: Path):
    source = sharded(tmp_path / "m")
    for name in ("pytorch_model.bin", "training_args.bin", "modeling_x.py", "stray.safetensors", "LICENSE", ".hidden"):
        (source / name).write_bytes(b"x")
    assert import_model(str(source), None, home) == "m"
    assert sorted(path.name for path in imported_folder(home, "m").iterdir()) == [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "postgrad-model.json",
        "tokenizer.json",
    ]
    assert [path.name for path in (home / "models").iterdir()] == ["m"]


def test_importing_the_same_again_is_a_no_op_and_other_content_a_conflict(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "m")
    weights = imported_folder(catalog.home, "m") / "model.safetensors"
    before = (weights.stat().st_ino, weights.stat().st_mtime_ns)
    same = model_folder(tmp_path / "copy")
    assert import_model(str(same), "m", catalog.home, catalog.database) == "m"
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == before
    with pytest.raises(Conflict, match="choose another id"):
        import_model(str(model_folder(tmp_path / "differs", 9.0)), "m", catalog.home, catalog.database)
    (same / "tokenizer.json").write_text('{"version": "2.0"}')
    with pytest.raises(Conflict):
        import_model(str(same), "m", catalog.home, catalog.database)


def test_saving_the_source_again_in_place_does_not_change_the_import(home: Path, tmp_path: Path):
    source = model_folder(tmp_path / "m")
    import_model(str(source), None, home)
    held = imported_folder(home, "m") / "model.safetensors"
    before = held.read_bytes()
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    assert held.read_bytes() == before != (source / "model.safetensors").read_bytes()


def test_a_single_file_stands_before_an_index_as_transformers_has_it(home: Path, tmp_path: Path):
    source = sharded(tmp_path / "m")
    safetensors(source / "model.safetensors", {"a": [1.0]})
    import_model(str(source), None, home)
    held = [path.name for path in imported_folder(home, "m").iterdir() if path.name.startswith("model")]
    assert held == ["model.safetensors"]


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _meta_format(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    (folder / "consolidated.00.pth").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json: point at the folder"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json: save"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor .*point at the folder"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04pickle..."), "is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "cut short"),
        (_truncate, "download it again"),
        (_only_pickle, "pickle .pytorch_model.bin., which can run code.*save_pretrained"),
        (_meta_format, "Meta's format.*get its Hugging Face form"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    ],
)
def test_an_incomplete_model_is_refused_and_nothing_is_left(home: Path, tmp_path: Path, spoil, message: str):
    source = model_folder(tmp_path / "m")
    spoil(source)
    with pytest.raises(ModelInvalid, match=message):
        import_model(str(source), None, home)
    assert not (home / "models").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "model-2.safetensors").unlink(), "model-2.safetensors, which .* names, is missing"),
        (lambda f: safetensors(f / "model-2.safetensors", {"c": [2.0]}), "model-2.safetensors lacks b"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../m.safetensors"}}'),
            "no safetensors file beside it",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_an_incomplete_set_of_shards_is_refused(tmp_path: Path, spoil, message: str):
    source = sharded(tmp_path / "m")
    spoil(source)
    with pytest.raises(ModelInvalid, match=message):
        check_model(source)


def test_the_hub_is_not_asked_unless_allowed(home: Path):
    with pytest.raises(ModelNotFound, match=f"not fetched from the hub unasked: download {LLAMA} .*--allow-hub"):
        import_model(SKU, None, home)
    with pytest.raises(ModelNotFound, match="there is no folder 'nowhere', and it is no hub id"):
        import_model("nowhere", None, home, allow_hub=True)


def test_a_repository_in_the_hubs_own_cache_is_imported_under_its_id(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The hub's cache layout, so that its client finds the repository without a network.
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = model_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    weights = (repository / "blobs").mkdir() or repository / "blobs" / "1"
    (snapshot / "model.safetensors").rename(weights)
    (snapshot / "model.safetensors").symlink_to(weights)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert import_model("org/tiny", None, home, allow_hub=True) == "org/tiny"
    held = imported_folder(home, "org/tiny") / "model.safetensors"
    assert held.is_file()
    assert not held.is_symlink()


def test_a_bad_id_is_refused_before_anything_is_written(home: Path, tmp_path: Path):
    with pytest.raises(InvalidField):
        import_model(str(model_folder(tmp_path / "m")), "../x", home)
    assert list(home.iterdir()) == []


# -- exporting -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_exported_once_as_a_whole_verified_model(catalog: ModelCatalog, tmp_path: Path):
    _trained(catalog, tmp_path)
    exported = export_merged(catalog, "base-sft-j-0")
    assert exported == catalog.home / "exports" / "base-sft-j-0-merged-fp32"
    check_model(exported)
    stamp = (exported / "model.safetensors").stat().st_mtime_ns
    assert export_merged(catalog, "base-sft-0") == exported
    assert (exported / "model.safetensors").stat().st_mtime_ns == stamp
    assert not (exported / "README.md").exists()  # no job of this store made it, so nothing is known of the run
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_an_adapter_that_cannot_be_merged_leaves_no_export(catalog: ModelCatalog, tmp_path: Path):
    _trained(catalog, tmp_path, module="model.layers.9.self_attn.q_proj")
    with pytest.raises((ModelInvalid, CheckpointUnverified), match="wrong base model"):
        export_merged(catalog, "base-sft-j-0")
    assert list((catalog.home / "exports").iterdir()) == []


def test_a_base_model_has_nothing_to_merge(catalog: ModelCatalog, tmp_path: Path):
    imported(catalog, tmp_path, "base")
    with pytest.raises(InvalidField, match="nothing to merge"):
        export_merged(catalog, "base")


def _trained(catalog: ModelCatalog, tmp_path: Path, module: str = "model.layers.0.self_attn.q_proj") -> None:
    from tests.test_checkpoints import lora
    from tests.torchtune_models import make_model

    make_model(tmp_path / "base", "llama")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    import_model(str(tmp_path / "base"), None, catalog.home, catalog.database)
    checkpoint(catalog, "base", "j", completed=True)
    base = catalog.resolve("base").base_dir
    lora(catalog.home / "jobs/j/checkpoints/10/adapter", base, {module: (32, 32)})


def test_the_catalog_never_loads_torch():
    code = (
        "import sys; import post_training.catalog.models, post_training.catalog.importing\n"
        "import post_training.catalog.exporting; print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout.strip() == "set()", done.stderr
    assert os.environ.get("POSTGRAD_LIFELINE_FD") is None
