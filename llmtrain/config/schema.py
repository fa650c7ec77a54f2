"""The sections of a config: every key, its type, its default and one sentence on it.

Frozen and strict: an unknown key is refused, a bool or a string is no number, nothing is infinite.
Defaults are here and nowhere else. The sentence below a key is its description, which messages and
the reference page show.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from llmtrain.batch_size import BatchSize
from llmtrain.types import Algorithm, JsonObject


def _at_most(most: float, **limits: Any) -> Any:
    """Return the limits of a number. Its upper one is far above any use, so words leave it out."""
    return Field(le=most, json_schema_extra={"generous": True}, **limits)


# Larger numbers are slips: they would overflow in a library, or never end.
_COUNTS, _FP32 = 10**12, 3e38
Positive = Annotated[int, _at_most(_COUNTS, ge=1)]
Count = Annotated[int, _at_most(_COUNTS, ge=0)]
Blocks = Annotated[int, _at_most(2**31 - 1, ge=1)]
Processes = Annotated[int, _at_most(1024, ge=0)]
Epochs = Annotated[float, _at_most(1e6, gt=0)]
Gigabytes = Annotated[float, _at_most(2**20, gt=0)]
Minutes = Annotated[float, _at_most(5_256_000, gt=0)]  # ten years
Factor = Annotated[float, _at_most(_FP32, ge=0)]
PositiveFactor = Annotated[float, _at_most(_FP32, gt=0)]
Auto = Literal["auto"]
Origin = Literal["file", "command line"]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(pattern=r"\S")]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Names = Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
EXPERT = Field(json_schema_extra={"expert": True})


class Section(BaseModel):
    """A group of keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    """Where the run lives and what its randomness starts from."""

    dir: Text | None = None
    """Run directory; null = `runs/` and the name of the config file."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of the weights, the order of the data and dropout."""


class TrainTokenizer(Section):
    """A tokenizer that the run trains itself."""

    train: Annotated[int, _at_most(2**20, ge=257)]
    """Entries of a byte-level BPE trained on the run's own training documents."""


class ModelConfig(Section):
    """The model and its tokenizer."""

    from_: Text | None = Field(None, alias="from")
    """Hub id, directory, or run (its best checkpoint), whose weights training starts from."""
    revision: Text | None = None
    """Branch, tag or commit of a Hub id in `from`."""
    config: JsonObject = Field({})
    """`model_type` and its own fields, as transformers names them."""
    tokenizer: Text | TrainTokenizer = "auto"
    """Directory, Hub id, `sample` or {train: N}; auto = the tokenizer of `from`."""
    attention_backend: Literal["auto", "flash", "cudnn", "math"] = "auto"
    """Kernel of attention that is tried first; flash and cudnn need CUDA, math is the slow one that
    always works. auto = torch's own order. Frozen while the type of device stays.
    """
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What the backward computes again instead of keeping it: nothing, all but matrix products and
    attention, whole blocks. auto = as the memory plan needs.
    """
    freeze: Texts = ()
    """Patterns (with * and ?) of parameter names that are not trained."""
    pad_vocab_to: Annotated[Blocks | None, EXPERT] = None
    """Fewest rows of the embeddings where the tokenizer decides their number: in a new model, and
    when its tokens need more rows than the weights have; null = as many as it has entries.
    """


class DocumentsConfig(Section):
    """Documents from one place."""

    path: Text
    """Hub data set id, directory, file or glob, or `sample`."""
    name: Text | None = None
    """Config name of a data set."""
    split: Text = "train"
    """Split of a data set: on the Hub, and in a directory that has splits."""
    revision: Text | None = None
    """Commit, tag or branch of a Hub data set."""
    text_column: Text = "text"
    """Column (JSONL: key) that holds the text; left out, columns of conversations come first."""
    columns: dict[Text, Text] = Field({})
    """Conversations: names as `prompt` or `messages` → the source's own columns."""
    document: Literal["line", "file"] = "line"
    """Text files: whether each line is a document, or the whole file (.txt, .md)."""


class SourceConfig(DocumentsConfig):
    """Documents to train on."""

    id_column: Text = "id"
    """Column whose hash decides what is held out; absent = the text is hashed."""
    weight: Annotated[float, _at_most(1e9, gt=0)] = 1.0
    """Share of the blocks, relative to the other sources."""
    max_epochs: Annotated[int, _at_most(10**6, ge=1)] | None = None
    """Passes over the source; then only the others continue; null = any."""


PackingName = Literal["concat", "bestfit", "single"]


class DataConfig(Section):
    """What is trained on, and in which order."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)]
    """Where the documents come from."""
    seq_len: Annotated[int, _at_most(2**27, ge=2)] = 1024
    """Trained positions of a block."""
    packing: Literal["auto", PackingName] = "auto"
    """concat: one stream of documents, cut; bestfit: a document that fits a block is never cut;
    single: a document a block, which is padded. auto = concat; with conversations bestfit, or
    single where the model cannot hide those of a block from each other.
    """
    document_mask: bool | Auto = "auto"
    """Whether documents of a block are hidden from each other; auto = but with concat."""
    lanes: Annotated[int, _at_most(2**16, ge=1)] | Auto = "auto"
    """Independent readers that the blocks are dealt from; frozen in the run."""
    heldout: Share = 0.005
    """Share of the documents that are never trained on."""
    workers: Processes | Auto = "auto"
    """Processes that read ahead for each rank; 0 = in the rank itself."""
    cache_gb: Annotated[float, _at_most(2**20, ge=0)] = 0.0
    """Disk in GiB for bytes read from the Hub, kept between runs; 0 = none."""
    on_bad_unit: Literal["error", "skip"] = "error"
    """What to do when a file part cannot be read; skips are recorded."""


class ChatConfig(Section):
    """How conversations become tokens, and which of these are trained on."""

    template: Text | None = None
    """chatml, llama3, gemma, a .jinja file, or the template itself; null = that of the tokenizer.
    The named ones add their tokens to the tokenizer, also in a run on texts.
    """
    template_kwargs: JsonObject = Field({})
    """Further variables of the template, such as enable_thinking: false."""
    train_turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are trained on."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a conversation, or a pair of answers, of more than `data.seq_len` tokens:
    leave it out, keep its beginning, or split it before messages of the user (not a pair).
    """
    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a row that is no conversation; skipped ones are counted."""
    end_of_turn: Annotated[Text | Auto | Names, EXPERT] = "auto"
    """The token that ends a turn of the assistant, or a list of them; auto = what the template
    writes behind an answer and behind a call of a tool.
    """
    rewritten_history: Annotated[Literal["split", "last", "error"], EXPERT] = "split"
    """What to do with turns that the template writes otherwise once they are history: train them in
    sequences of their own, or not at all.
    """
    control_tokens: Annotated[Literal["text", "error"], EXPERT] = "text"
    """What control tokens in the content of a message are: text, or a bad row."""


class BatchFrom(Section):
    """The size of the batch from a step on."""

    from_step: Positive
    """The first step with this size; 1 in the first entry."""
    size: Blocks
    """Blocks in a step."""


class TrainingConfig(Section):
    """How long, how much at once, how exactly."""

    steps: Positive | None = None
    """Optimizer updates of the whole run; exactly one of steps and epochs."""
    epochs: Epochs | None = None
    """Passes over the training documents; becomes a number of steps once."""
    global_batch_size: (
        Blocks | Annotated[tuple[BatchFrom, ...], Field(min_length=1, strict=False)]
    ) = 256
    """Blocks in a step, whatever the number of devices; a list of `{from_step: …, size: …}` lets
    the batch grow at these steps.
    """
    micro_batch_size: Blocks | Auto = "auto"
    """Blocks in one forward on one device."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of forward and backward; weights and moments are fp32. auto = bf16 where a GPU has
    it, and on a CPU where a timed product says that it is faster; the run keeps the answer.
    """
    compile: Literal["auto", "off", "blocks", "model"] = "auto"
    """What torch compiles: nothing, each block, or the whole decoder; auto = blocks on CUDA from
    2,000 steps on, else off. Frozen while the type of device stays.
    """
    max_grad_norm: PositiveFactor | None = 1.0
    """Gradients are scaled down to this norm; null = never."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What to do when a loss or norm is not finite."""
    loss_kernel: Annotated[Literal["auto", "chunked", "logits", "torch"], EXPERT] = "auto"
    """How head and loss are computed: in chunks of rows, from all logits, or by torch; auto =
    chunked where the model's head is plain.
    """
    z_loss: Annotated[Factor, EXPERT] = 0.0
    """Factor of logsumexp² of the logits, which keeps them small; not in the logged loss."""
    max_skipped_in_a_row: Annotated[Positive, EXPERT] = 5
    """This many skipped updates in a row end the run."""
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | Auto, EXPERT] = "auto"
    """Threads that a process computes with on its CPUs; auto = `OMP_NUM_THREADS` where you have set
    it, else the process's share of the cores that it may use. Frozen for launches of the same kind.
    With `same_bits` on CPUs auto = 1.
    """
    deterministic: Annotated[bool, EXPERT] = False
    """Whether only operations that give equal bits each time are used, on CUDA too, where they are
    slower.
    """
    same_bits: Annotated[bool, EXPERT] = False
    """Whether weights and moments are the same to the bit on any number of processes, under ddp and
    fsdp2; `micro_batch_size` and, on CPUs, `threads` then decide them. It needs `precision: fp32`.
    """

    @property
    def batch(self) -> BatchSize:
        """The blocks of each step."""
        asked = self.global_batch_size
        if isinstance(asked, int):
            return BatchSize.constant(asked)
        return BatchSize(tuple((one.from_step, one.size) for one in asked))


class GroupConfig(Section):
    """Parameters with a learning rate or decay of their own."""

    match: Text
    """Pattern (with * and ?) of parameter names; a parameter belongs to the first entry that
    matches.
    """
    learning_rate: PositiveFactor | None = None
    """Peak learning rate; null = that of all others."""
    weight_decay: Factor | None = None
    """Decay, also of what is not decayed otherwise; null = as for all others."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Algorithm = "adamw"
    """adamw; adamw_8bit (bitsandbytes, where the model is not sharded); muon: for the matrices
    between embedding and head, with AdamW for the rest (not under ZeRO; under FSDP2 losses depend
    on the number of processes).
    """
    learning_rate: PositiveFactor = 3e-4
    """Peak learning rate."""
    weight_decay: Factor = 0.1
    """Decoupled decay of weight matrices; none on embeddings, norms and biases."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Annotated[float, _at_most(_COUNTS, gt=0)] = 100
    """Steps of linear warm-up; a fraction below 1 is a share of the steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate as a share of the peak."""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = ()
    """Exceptions for some parameters: their learning rate, their decay."""


class AdapterConfig(Section):
    """Small matrices that are trained beside the frozen weights of `model.from`."""

    kind: Literal["none", "lora", "dora", "rslora", "qlora"] = "none"
    """What is trained instead of the weights themselves; qlora = lora on a base that is held in
    four bits, on CUDA.
    """
    r: Annotated[int, _at_most(2**16, ge=1)] = 16
    """Rank of the matrices."""
    alpha: Annotated[int, _at_most(2**20, ge=1)] = 32
    """What they add is multiplied by alpha / r (rslora: by alpha / √r)."""
    dropout: Share = 0.0
    """Share of their inputs that is dropped in training."""
    targets: Text | Texts = "auto"
    """Patterns (with * and ?) of the names of linear layers, or of how these end; auto = every
    linear layer but the head.
    """
    train_tokens: Annotated[Auto | Texts, EXPERT] = "auto"
    """Entries of the tokenizer whose embeddings are trained too; auto = those that the run added.
    """


PreferenceLoss = Literal[
    "none",
    "dpo",
    "dpo_norm",
    "robust",
    "ipo",
    "hinge",
    "apo_zero",
    "orpo",
    "simpo",
    "cpo",
    "kto",
    "reward",
]


Answers = Literal["pairs", "feedback"]  # what a run with `preference.loss` trains on


class PreferenceConfig(Section):
    """Training on pairs of answers, of which one is preferred, or on answers that were judged."""

    loss: PreferenceLoss = "none"
    """The loss of a pair; none = the run trains on texts and conversations. kto takes answers with
    a label, reward trains a model that scores answers.
    """
    beta: PositiveFactor = 0.1
    """How strongly the model is held to its reference; the smaller, the further it may go."""
    label_smoothing: Annotated[Annotated[float, Field(ge=0, lt=0.5)], EXPERT] = 0.0
    """Share of the pairs that are taken to be the wrong way round (dpo, dpo_norm, robust, simpo,
    cpo).
    """
    gamma: Annotated[Factor, EXPERT] = 0.0
    """The margin that the chosen answer is to have (simpo)."""
    sft_weight: Annotated[Factor, EXPERT] = 0.0
    """Weight of the chosen answer's own loss, in nats per token (all but kto and reward)."""
    desirable_weight: Annotated[Factor, EXPERT] = 1.0
    """Weight of good answers (kto)."""
    undesirable_weight: Annotated[Factor, EXPERT] = 1.0
    """Weight of bad answers (kto)."""
    reference: Annotated[Text, EXPERT] = "start"
    """start = the log-probabilities of the answers by the weights that the run begins with,
    computed once; or a run that has the same ones.
    """

    @property
    def answers(self) -> Answers | None:
        """What the sources have: pairs of answers, or answers that were judged; None = neither."""
        if self.loss == "none":
            return None
        return "feedback" if self.loss == "kto" else "pairs"

    @property
    def scores(self) -> bool:
        """Whether the model is to score answers, as a reward model does, instead of tokens."""
        return self.loss == "reward"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the log-probabilities of a reference."""
        return self.loss not in ("none", "orpo", "simpo", "cpo", "reward")


class DdpConfig(Section):
    """Settings of DDP."""

    bucket_cap_mb: Annotated[int, _at_most(2**20, ge=1)] | Auto = "auto"
    """MiB of gradients reduced at once under DDP; auto = 25, and on GPUs 100 from 1 GB of
    gradients.
    """
    find_unused_parameters: bool = False
    """Whether DDP looks for parameters that a step did not use."""


class DistributedConfig(Section):
    """Processes and devices."""

    strategy: Literal[
        "auto", "ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"
    ] = "auto"
    """How the model is spread out; auto = as launched, or by the memory plan."""
    tensor_parallel: Positive | Auto = "auto"
    """Processes that share each matrix of the model; auto = as launched, else 1."""
    pipeline_parallel: Positive = 1
    """Processes that share the blocks of the model, one stage after another."""
    pipeline_schedule: Annotated[Literal["1f1b", "gpipe", "interleaved"], EXPERT] = "1f1b"
    """The order of forwards and backwards of a pipeline; interleaved needs several stages a rank.
    """
    pipeline_stages_per_rank: Annotated[Positive, EXPERT] = 1
    """Stages that each process of a pipeline holds; more wait less, and exchange more."""
    sequence_parallel: Positive | Auto = "auto"
    """Processes that share the positions of each row; auto = as launched, else 1."""
    device_memory_gb: Gigabytes | Auto = "auto"
    """Memory of a device in GiB for the plan; auto = that of the device."""
    ddp: DdpConfig = Field(default_factory=DdpConfig)
    wrap_class: Annotated[Text | Auto, EXPERT] = "auto"
    """Class of the blocks that FSDP2 shards one by one; auto = the model names it."""
    fsdp_sync: Annotated[Literal["auto", "every", "last"], EXPERT] = "auto"
    """Micro-batches whose gradients FSDP2 reduces: each, or the last alone, which is faster and
    keeps whole gradients; auto = last where the plan has room.
    """
    timeout_minutes: Minutes = 20.0
    """After this long without an answer from a peer, a rank gives up."""


class CheckpointConfig(Section):
    """What is kept on disk, and when."""

    every_steps: Positive = 500
    """Steps between checkpoints."""
    keep_last: Annotated[int, _at_most(10**6, ge=2)] = 3
    """Newest checkpoints to keep."""
    keep_every: Count = 0
    """Checkpoints at multiples of this many steps are kept permanently; 0 = none."""
    keep_best: Annotated[int, _at_most(10**6, ge=0)] = 1
    """Checkpoints of lowest held-out loss to keep; each evaluation that is the best so far is
    saved. 0 = none.
    """
    background: bool | Auto = "auto"
    """Whether files are written beside the training; auto = with a GPU."""
    stop_after: Text | None = None
    """Stop with a checkpoint so that it is complete this long after the start: "3h50m", "90m",
    "45s"; null = never.
    """
    resume: Text = "auto"
    """What a start resumes from: `auto`, the newest valid checkpoint; `never` (the directory must
    be new); or the name of a checkpoint of the run, as step-00000400.
    """
    accept_changes: Texts = ()
    """Keys, or sections, whose new values a resume takes although they change the run."""
    every_minutes: Annotated[Minutes | None, EXPERT] = None
    """Minutes between checkpoints, besides those by steps; null = never."""
    verify: Annotated[Literal["full", "sizes"], EXPERT] = "full"
    """What is compared before a checkpoint is read: the digest of every byte, or, of weights and
    optimizer state, their sizes alone.
    """
    writers: Annotated[Literal["auto", "rank0", "all"], EXPERT] = "auto"
    """Which ranks write; auto = rank 0 under DDP, and on NFS with several nodes."""
    supersede: Annotated[bool, EXPERT] = False
    """Whether checkpoints newer than the one that `resume` names are renamed."""
    shard_gb: Annotated[Gigabytes, EXPERT] = 4.0
    """Largest weight or optimizer file in GiB."""


class EvaluationConfig(Section):
    """Measuring on documents that are never trained on."""

    every_steps: Positive = 500
    """Steps between evaluations."""
    sources: Annotated[tuple[DocumentsConfig, ...], Field(strict=False)] = ()
    """Validation data of its own, as data.sources; then nothing is held out."""
    max_documents: Positive = 2000
    """Held-out documents that are scored."""
    prompts: Texts = ()
    """Texts that the model continues at every evaluation."""
    patience: Positive | None = None
    """This many evaluations in a row without a lower loss end the run; null = never."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class LoggingConfig(Section):
    """What is written down."""

    every_steps: Positive = 10
    """Steps between lines of metrics."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Where metrics go besides `metrics.jsonl`."""
    profile_steps: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    """First and last step to profile: a trace of each rank in profile/; null = none."""


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    chat: ChatConfig = Field(default_factory=ChatConfig)
    training: TrainingConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Who set each key that is not at its default: dotted key → origin."""
        return self._origins

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal, whoever has set them."""
        return isinstance(other, Config) and dict(self) == dict(other)

    def __hash__(self) -> int:
        """Hash the values."""
        return hash(tuple(dict(self).values()))

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
