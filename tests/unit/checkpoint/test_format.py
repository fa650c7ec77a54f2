import json

import pytest
import torch
from helpers.checkpoints import SPEC, tensors
from hypothesis import given, settings, strategies as st
from safetensors.torch import load, save
from xxhash import xxh3_128_hexdigest

from llmtrain.checkpoint import format as form
from llmtrain.checkpoint.format import (
    CheckpointManifest,
    DamagedError,
    Entry,
    Extent,
    OtherFormatError,
)
from llmtrain.types import TensorSpec

MANIFEST = CheckpointManifest("run", 300, {"a/b.json": Entry(5, form.extents_of(b"12345"))})


def test_a_step_stands_in_eight_digits_and_is_read_back():
    assert form.directory_name(300) == "step-00000300"
    assert form.step_of("step-00000300") == 300
    assert form.step_of(form.directory_name(123_456_789)) == 123_456_789


@pytest.mark.parametrize(
    "name",
    [
        "step-9",
        "step-000000300",
        "step-00000300.partial",
        "step-00000300.damaged",
        "xstep-00000300",
    ],
)
def test_other_names_are_no_checkpoints(name):
    assert form.step_of(name) is None


def test_header_and_tensors_are_what_safetensors_writes():
    part = {
        "b": TensorSpec("F32", (2, 3)),
        "c": TensorSpec("F32", ()),
        "a": TensorSpec("BF16", (3,)),
    }
    values = tensors({"f": part})
    body = b"".join(values[name].view(-1).view(torch.uint8).numpy().tobytes() for name in part)
    # safetensors itself orders by width of the dtype, then by name.
    assert form.header(part) + body == save(values, metadata={"format": "pt"})


def test_every_place_is_where_safetensors_looks():
    for file, part in SPEC.items():
        values = tensors({file: part}, seed=3)
        body = bytearray(form.file_bytes(part))
        body[: len(form.header(part))] = form.header(part)
        for name, place in form.places({file: part}).items():
            raw = values[name].view(-1).view(torch.uint8).numpy().tobytes()
            body[place.offset : place.offset + len(raw)] = raw
        found = load(bytes(body))
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], values[name]) for name in part)


def test_tensors_begin_on_eight_bytes():
    for length in range(20):
        assert len(form.header({"x" * length: TensorSpec("F32", (1,))})) % 8 == 0


def test_a_narrow_dtype_before_a_wide_one_is_refused():
    with pytest.raises(ValueError, match="not aligned"):
        form.header({"mask": TensorSpec("BOOL", (3,)), "weight": TensorSpec("F32", (1,))})


def test_a_name_in_two_files_is_refused():
    part = {"a": TensorSpec("F32", (1,))}
    with pytest.raises(ValueError, match="another file"):
        form.places({"1": part, "2": part})


def test_a_manifest_is_read_back_as_it_was():
    assert form.parse(form.build(MANIFEST)) == MANIFEST


def test_the_manifest_is_canonical_json_that_digests_itself():
    body = form.build(MANIFEST)
    found = json.loads(body)
    digest = found.pop("self")
    rest = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    assert digest == xxh3_128_hexdigest(rest)
    assert found["files"]["a/b.json"] == {
        "size": 5,
        "extents": [[0, 5, xxh3_128_hexdigest(b"12345")]],
    }


@settings(deadline=None)
@given(st.data())
def test_no_bit_of_a_manifest_is_unguarded(data):
    body = bytearray(form.build(MANIFEST))
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedError):
        form.parse(bytes(body))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"a":NaN}', b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_manifest_is_damage(body):
    with pytest.raises(DamagedError):
        form.parse(body)


def test_white_space_after_a_manifest_is_damage():
    with pytest.raises(DamagedError):
        form.parse(form.build(MANIFEST) + b"\n")


def signed(**fields):
    """An intact manifest with other fields."""
    found = json.loads(form.build(MANIFEST)) | fields
    del found["self"]
    return form.canonical({**found, "self": xxh3_128_hexdigest(form.canonical(found))})


def test_an_intact_manifest_of_a_newer_format_is_no_damage():
    with pytest.raises(OtherFormatError) as caught:
        form.parse(signed(format=2, files="something else"))
    assert (caught.value.found, caught.value.run_id) == (2, "run")


@pytest.mark.parametrize(
    "files",
    [
        {"../x": {"size": 0, "extents": []}},
        {"/etc/x": {"size": 0, "extents": []}},
        {"a/../x": {"size": 0, "extents": []}},
        {"a//x": {"size": 0, "extents": []}},
        {"./x": {"size": 0, "extents": []}},
        {"": {"size": 0, "extents": []}},
        {"a\\x": {"size": 0, "extents": []}},
        {"a\x00x": {"size": 0, "extents": []}},
        {"x": {"size": 3, "extents": []}},
        {"x": {"size": 3, "extents": [[0, 2, ""]]}},
        {"x": {"size": 3, "extents": [[0, 2, ""], [1, 2, ""]]}},
        {"x": {"size": 3, "extents": [[0, 4, ""], [4, -1, ""]]}},
        {"x": {"extents": []}},
        {"x": None},
        [],
        {},
        {f"f{i}": {"size": 0, "extents": []} for i in range(form.MAX_FILES + 1)},
    ],
    ids=lambda files: str(files)[:30],
)
def test_a_signed_manifest_that_is_unsafe_is_damage(files):
    with pytest.raises(DamagedError):
        form.parse(signed(files=files))


def test_a_gap_an_overlap_and_an_extent_too_large_are_found():
    def gap(size, *extents):
        return form.gap(Entry(size, tuple(Extent(*extent, "") for extent in extents)))

    assert gap(0) is None
    assert gap(5, (2, 3), (0, 2)) is None
    assert gap(5, (0, 2), (3, 2)) is not None
    assert gap(5, (0, 3), (2, 3)) is not None
    assert gap(5, (0, 5), (0, 5)) is not None
    assert gap(6, (0, 5)) is not None
    assert gap(form.EXTENT_BYTES + 1, (0, form.EXTENT_BYTES + 1)) is not None


def test_a_large_small_file_has_extents_of_64_mib(monkeypatch):
    monkeypatch.setattr(form, "EXTENT_BYTES", 4)
    extents = form.extents_of(b"123456789")
    assert [(extent.offset, extent.length) for extent in extents] == [(0, 4), (4, 4), (8, 1)]
    assert extents[1].digest == xxh3_128_hexdigest(b"5678")


def test_a_symbolic_link_is_no_file_of_a_checkpoint(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(b"x")
    inside = tmp_path / "step-00000001"
    inside.mkdir()
    (inside / "x").symlink_to(tmp_path / "outside" / "x")
    (inside / "linked").symlink_to(tmp_path / "outside")
    for name in ("x", "linked/x", "absent"):
        with pytest.raises(DamagedError):
            form.regular_size(inside, name)
    (tmp_path / "way").symlink_to(tmp_path)
    (inside / "y").write_bytes(b"yy")
    assert form.regular_size(tmp_path / "way" / "step-00000001", "y") == 2
