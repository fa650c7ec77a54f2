"""The sections of a config: every key, its type, its default and one sentence on it.

Frozen and strict: an unknown key is refused, a bool or a string is no number, nothing is infinite.
Defaults are here and nowhere else. The sentences are in the help and the reference page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Auto = Literal["auto"]
Text = Annotated[str, Field(pattern=r"\S")]


class Section(BaseModel):
    """A group of keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )


class RunConfig(Section):
    """Where the run lives and what its randomness starts from."""

    dir: Text | None = Field(None, description="Run directory; null = runs/<config file's name>.")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        42, description="Seed of the weights, the order of the data and dropout."
    )


class TrainTokenizer(Section):
    """A tokenizer that the run trains itself."""

    train: Annotated[int, Field(ge=257)] = Field(
        description="Entries of a byte-level BPE trained on the run's own training documents."
    )


class ModelConfig(Section):
    """The model and its tokenizer."""

    from_: Text | None = Field(
        None, alias="from", description="Hub id or directory whose weights training starts from."
    )
    revision: Text | None = Field(None, description="Branch, tag or commit of a Hub id in `from`.")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="`model_type` and its own fields, as transformers names them.",
    )
    tokenizer: Text | TrainTokenizer = Field(
        "auto",
        description="Directory, Hub id, `sample` or {train: N}; auto = the tokenizer of `from`.",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="What the backward computes again instead of keeping it: nothing, all but "
        "matrix products and attention, whole blocks. auto = as the memory plan needs.",
    )
    freeze: tuple[Text, ...] = Field(
        (),
        strict=False,
        description="Patterns (with * and ?) of parameter names that are not trained.",
    )


class DocumentsConfig(Section):
    """Documents from one place."""

    path: Text = Field(description="Hub data set id, directory, file or glob, or `sample`.")
    name: Text | None = Field(None, description="Config name of a Hub data set.")
    split: Text = Field("train", description="Split of a Hub data set.")
    revision: Text | None = Field(None, description="Commit, tag or branch of a Hub data set.")
    text_column: Text = Field("text", description="Column (JSONL: key) that holds the text.")


class SourceConfig(DocumentsConfig):
    """Documents to train on."""

    id_column: Text = Field(
        "id", description="Column whose hash decides what is held out; absent = the text is hashed."
    )
    weight: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Share of the blocks, relative to the other sources."
    )
    max_epochs: Positive | None = Field(
        None, description="Passes over the source; then only the others continue; null = any."
    )


PackingName = Literal["concat", "bestfit"]


class DataConfig(Section):
    """What is trained on, and in which order."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)] = Field(
        description="Where the documents come from."
    )
    seq_len: Annotated[int, Field(ge=2)] = Field(1024, description="Trained positions of a block.")
    packing: Literal["auto", PackingName] = Field(
        "auto",
        description="concat: one stream of documents, cut; bestfit: a document that fits a block "
        "is never cut. auto = concat.",
    )
    document_mask: bool | Auto = Field(
        "auto",
        description="Whether documents of a block are hidden from each other; auto = with bestfit.",
    )
    lanes: Positive | Auto = Field(
        "auto", description="Independent readers that the blocks are dealt from; frozen in the run."
    )
    heldout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.005, description="Share of the documents that are never trained on."
    )
    workers: Count | Auto = Field(
        "auto", description="Processes that read ahead for each rank; 0 = in the rank itself."
    )
    cache_gb: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Disk in GiB for bytes read from the Hub, kept between runs; 0 = none."
    )
    on_bad_unit: Literal["error", "skip"] = Field(
        "error", description="What to do when a file part cannot be read; skips are recorded."
    )


class TrainingConfig(Section):
    """How long, how much at once, how exactly."""

    steps: Positive | None = Field(
        None, description="Optimizer updates of the whole run; exactly one of steps and epochs."
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Passes over the training documents; becomes a number of steps once."
    )
    global_batch_size: Positive = Field(
        256, description="Blocks in a step, whatever the number of devices."
    )
    micro_batch_size: Positive | Auto = Field(
        "auto", description="Blocks in one forward on one device."
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="Arithmetic of forward and backward; weights and moments are fp32.",
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Gradients are scaled down to this norm; null = never."
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        "skip", description="What to do when a loss or norm is not finite."
    )
    max_skipped_in_a_row: Positive = Field(
        5,
        description="This many skipped updates in a row end the run.",
        json_schema_extra={"expert": True},
    )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: Annotated[float, Field(gt=0)] = Field(3e-4, description="Peak learning rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="Decoupled decay of weight matrices; none on embeddings, norms and biases."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), strict=False, description="Decay rates of the two moments."
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup_steps: Annotated[float, Field(gt=0)] = Field(
        100, description="Steps of linear warm-up; a fraction below 1 is a share of the steps."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Last learning rate as a share of the peak."
    )


class DdpConfig(Section):
    """Settings of DDP."""

    bucket_cap_mb: Positive = Field(25, description="MiB of gradients reduced at once under DDP.")
    find_unused_parameters: bool = Field(
        False, description="Whether DDP looks for parameters that a step did not use."
    )


class DistributedConfig(Section):
    """Processes and devices."""

    strategy: Literal[
        "auto",
        "ddp",
        "fsdp2",
        "fsdp2_offload",
        "hsdp",
        "zero1",
        "zero2",
        "zero3",
        "zero3_offload",
    ] = Field(
        "auto",
        description="How the model is spread out; auto = as launched, or by the memory plan.",
    )
    device_memory_gb: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="Memory of a device in GiB for the plan; auto = that of the device."
    )
    ddp: DdpConfig = Field(default_factory=DdpConfig)
    wrap_class: Text | Auto = Field(
        "auto",
        description="Class of the blocks that FSDP2 shards one by one; auto = the model names it.",
        json_schema_extra={"expert": True},
    )
    fsdp_sync: Literal["auto", "every", "last"] = Field(
        "auto",
        description="Micro-batches whose gradients FSDP2 reduces: each, or the last alone, which "
        "is faster and keeps whole gradients; auto = last where the plan has room.",
        json_schema_extra={"expert": True},
    )
    timeout_minutes: Annotated[float, Field(gt=0)] = Field(
        20.0, description="After this long without an answer from a peer, a rank gives up."
    )


class CheckpointConfig(Section):
    """What is kept on disk, and when."""

    every_steps: Positive = Field(500, description="Steps between checkpoints.")
    keep_last: Annotated[int, Field(ge=2)] = Field(3, description="Newest checkpoints to keep.")
    keep_every: Count = Field(
        0, description="Checkpoints at multiples of this many steps are kept permanently; 0 = none."
    )
    keep_best: Count = Field(1, description="Checkpoints of lowest held-out loss to keep.")
    background: bool | Auto = Field(
        "auto",
        description="Whether files are written beside the training; auto = with a GPU.",
    )
    stop_after: Text | None = Field(
        None,
        description="Stop with a checkpoint so that it is complete this long after the start: "
        '"3h50m", "90m", "45s"; null = never.',
    )
    resume: Text = Field(
        "auto",
        description="What a start resumes from: `auto`, the newest valid checkpoint; `never` (the "
        "directory must be new); or the name of a checkpoint of the run, as step-00000400.",
    )
    accept_changes: tuple[Text, ...] = Field(
        (),
        strict=False,
        description="Keys, or sections, whose new values a resume takes although they change the "
        "run.",
    )
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Minutes between checkpoints, besides those by steps; null = never.",
        json_schema_extra={"expert": True},
    )
    verify: Literal["full", "sizes"] = Field(
        "full",
        description="What is compared before a checkpoint is read: the digest of every byte, or, "
        "of weights and optimizer state, their sizes alone.",
        json_schema_extra={"expert": True},
    )
    writers: Literal["auto", "rank0", "all"] = Field(
        "auto",
        description="Which ranks write; auto = rank 0 under DDP, and on NFS with several nodes.",
        json_schema_extra={"expert": True},
    )
    supersede: bool = Field(
        False,
        description="Whether checkpoints newer than the one that `resume` names are renamed.",
        json_schema_extra={"expert": True},
    )
    shard_gb: Annotated[float, Field(gt=0)] = Field(
        4.0,
        description="Largest weight or optimizer file in GiB.",
        json_schema_extra={"expert": True},
    )


class EvaluationConfig(Section):
    """Measuring on documents that are never trained on."""

    every_steps: Positive = Field(500, description="Steps between evaluations.")
    sources: tuple[DocumentsConfig, ...] = Field(
        (),
        strict=False,
        description="Validation data of its own, as data.sources; then nothing is held out.",
    )
    max_documents: Positive = Field(2000, description="Held-out documents that are scored.")
    prompts: tuple[Text, ...] = Field(
        (), strict=False, description="Texts that the model continues at every evaluation."
    )


class LoggingConfig(Section):
    """What is written down."""

    every_steps: Positive = Field(10, description="Steps between lines of metrics.")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), strict=False, description="Where metrics go besides `metrics.jsonl`."
    )


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def run_dir(self) -> Path:
        """Where the run lives; `load_config` always fills `run.dir` in."""
        assert self.run.dir is not None
        return Path(self.run.dir)

    @property
    def total_steps(self) -> int:
        """Optimizer updates of the whole run; `training.epochs` has become steps by then."""
        assert self.training.steps is not None
        return self.training.steps
