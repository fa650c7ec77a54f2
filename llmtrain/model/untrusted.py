"""Check an untrusted model directory before transformers opens anything in it.

    config.json                      JSON of a moderate size, with sizes above 0
    model.safetensors.index.json     names files of this directory, each weight once
    *.safetensors                    regular files of this directory, with supported dtypes
    generation_config.json, tokenizer_config.json …   JSON objects, if they are there
    adapter_config.json              must not exist: transformers would load the adapter's base

Weights are read from safetensors only, because a pickled file can run any code when it is opened.
A message describes how to convert such files. The paths are checked because transformers follows
`../x.safetensors` in an index and symbolic links to any place.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from llmtrain.config.checks import field_problems
from llmtrain.errors import Problem, UserError, raise_any
from llmtrain.system import unsafe_file, unsafe_name
from llmtrain.types import DTYPES, JsonObject

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".distcp")
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # as peft names it
_GENERATION = "generation_config.json"
_OBJECTS = {_GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
KEY = "model.from"
_MAX_FILES = 10_000
_MAX_JSON_BYTES = 64 << 20
_SAVE = "AutoModelForCausalLM.from_pretrained(…).save_pretrained(DIR) writes safetensors"
_COPY = "copy them into it"
_CONVERT = f"convert it where you trust it: {_SAVE}; then model.from=DIR"
_MERGE = (
    "merge it: `llmtrain export --merge-adapters` if it is of a run, else peft's merge_and_unload "
    "and save_pretrained(DIR); then model.from=DIR"
)
_DCP = (
    "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch` where you trust it, put "
    f"the tensors into the model there, and {_SAVE}; then model.from=DIR"
)


def check(path: str) -> None:
    """Raise UserError, with every problem, if the path is not a safe model directory.

    A Hub id, which is not an existing path, is accepted.
    """
    place = Path(path)
    if place.is_file():
        expected, remedy = "a directory, or a model of the Hub", str(place.parent)
        if place.suffix in PICKLED:
            expected, remedy = "a model directory with safetensors, no pickled file", _CONVERT
        raise UserError(Problem(KEY, place, expected, remedy))
    if not place.is_dir():
        return
    try:
        problems = list(_problems(place))
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or place}"
        problems = [Problem(KEY, place, f"a model directory that can be read ({reason})")]
    raise_any(problems)


def adapter_problem(path: str, file: Path) -> Problem:
    """Return the problem of an adapter given as a model. file: its `adapter_config.json`."""
    try:
        base = read_json(file).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError):
        base = None
    expected = f"weights of a whole model; this is an adapter of {base or 'another model'}"
    return Problem(KEY, path, expected, _MERGE)


def other_kind(path: str, names: set[str]) -> Problem | None:
    """Return a problem if these are files of something else than a model with safetensors.

    path: the directory or Hub id, for the message
    names: of the files directly in it
    """
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return Problem(KEY, path, "a model directory; this is a DCP checkpoint (pickled)", _DCP)
    weights = [name for name in names if name.endswith(".safetensors")]
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if not weights and pickled:
        return Problem(KEY, path, f"safetensors, not the pickled {pickled[0]}", _CONVERT)
    if weights and "config.json" not in names:
        state = "; this is a state of accelerate" if pickled else ""
        expected = f"config.json beside the safetensors{state}"
        remedy = "copy config.json and the tokenizer of the model that it began with into it"
        return Problem(KEY, path, expected, remedy)
    return None


def _problems(place: Path) -> Iterator[Problem]:
    names = {entry.name for entry in place.iterdir()}
    if len(names) > _MAX_FILES:
        yield Problem(KEY, place, f"a model directory; this one has {len(names)} entries")
        return
    if ADAPTER_CONFIG in names:
        yield adapter_problem(str(place), place / ADAPTER_CONFIG)
        return
    if kind := other_kind(str(place), names):
        yield kind
        return
    yield from _object_problems(place, names)
    shards, wrong = _shards(place, names)
    yield from wrong
    for name in sorted({"config.json"} & names | shards):
        if reason := unsafe_file(place, name, _cache_of(place)):
            yield Problem(KEY, place, f"files of that directory; {reason}", _COPY)
        elif name == "config.json":
            try:
                config = read_json(place / name)
            except (ValueError, RecursionError) as error:
                yield Problem(KEY, place, f"a config.json that can be read ({error})")
                continue
            yield from field_problems(config, f"{place / name}: ")
            if (asked := config.get("quantization_config")) is not None:
                yield quantized(str(place), asked)
        else:
            yield from _dtype_problems(place, name)


def _object_problems(place: Path, names: set[str]) -> Iterator[Problem]:
    """Yield a problem for each small file of settings that is not what transformers expects."""
    for name in sorted(_OBJECTS & names):
        try:
            fields = read_json(place / name)
        except (ValueError, RecursionError) as error:
            yield Problem(KEY, place, f"a {name} that can be read ({error})")
            continue
        ends = fields.get("eos_token_id")
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if name == _GENERATION and not all(type(one) is int for one in ids):
            what = f"an id, or a list of ids, as eos_token_id; it is {json.dumps(ends)} in {name}"
            yield Problem(KEY, place, what)


def _shards(place: Path, names: set[str]) -> tuple[set[str], list[Problem]]:
    """Return the weight files that will be opened, and the problems of the index."""
    if "model.safetensors" in names or INDEX not in names:
        return {name for name in names if name.endswith(".safetensors")}, []
    if reason := unsafe_file(place, INDEX, _cache_of(place)):
        return set(), [Problem(KEY, place, f"files of that directory; {reason}", _COPY)]
    try:
        index = read_json(place / INDEX)
        files = {str(file) for file in index["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return set(), [Problem(KEY, place, f"an index that maps each weight to a file ({error})")]

    def wrong_with(file: str) -> str | None:
        return unsafe_name(file) or (None if (place / file).exists() else f"{file} is not there")

    wrong = [reason for file in sorted(files) if (reason := wrong_with(file))]
    expected = f"an index that names files of the directory; in {INDEX} "
    problems = [Problem(KEY, place, expected + reason) for reason in wrong[:5]]
    return set() if wrong else files, problems


def quantized(path: str, asked: object) -> Problem:
    """Return the problem of weights whose config asks for a quantization.

    path: the directory or Hub id, for the message
    """
    kind = asked.get("quant_method") if isinstance(asked, dict) else asked
    expected = f"plain weights; the quantization_config of its config.json asks for {kind}"
    remedy = "the unquantised weights of that model; if these are, take that key out of config.json"
    return Problem(KEY, path, expected, remedy)


def _dtype_problems(place: Path, name: str) -> Iterator[Problem]:
    import safetensors

    try:
        with safetensors.safe_open(place / name, "np") as opened:
            dtypes = {opened.get_slice(key).get_dtype() for key in opened.offset_keys()}
    except safetensors.SafetensorError as error:
        yield Problem(KEY, place, f"a model directory with whole safetensors: {name}: {error}")
        return
    for dtype in sorted(dtypes - DTYPES.keys()):
        expected = f"weights as numbers of 16 or 32 bits; {name} holds {dtype}"
        yield Problem(KEY, place, expected, "the unquantised weights of that model")


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file.

    Raises ValueError if it is another value, repeats a key or is too large, and OSError.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes")
    value = json.loads(path.read_bytes(), object_pairs_hook=_once)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")  # ValueError, as json's own errors
    return value


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common()
        raise ValueError(f"{name} occurs twice")
    return fields


def _cache_of(place: Path) -> Path | None:
    """Return the directory of the Hub's cache in which `place` is a snapshot; None elsewhere.

    The Hub's client makes the files of a snapshot as links to `blobs` in that directory.
    """
    real = place.resolve()
    is_snapshot = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if is_snapshot else None
