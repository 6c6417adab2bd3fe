"""helexa's worker messages, exactly as documented, and zrt's own ops in the same two unions: what a
leader and its TP ranks say.

Each is a JSON object whose `op` is the class name in snake_case (less a "Rank" that zrt put in
front), fields in the order they are declared here (see codecs/helexa.py). Every request is answered
by exactly one response; `RankError` may answer any of them. A rank takes them from its leader, in a
multipart like any between zrt actors, or bare from any peer, as a single frame.

| request | response | what it does |
| --- | --- | --- |
| Ping | Pong | who is there |
| Init | InitOk | join the communicator that `comm_id` names |
| NcclSanityCheck | NcclSanityResult | one all-reduce of 1 over all ranks |
| AssignStage | StageAssigned | zrt: what the next load is to hold |
| LoadDenseShard | LoadDenseShardOk | read this rank's slices |
| GenerateStep | GenerateStepOk | one forward of the peer's unnamed session |
| ClearKvCache | KvCacheCleared | end that session |
| OpenSession | SessionOpened | zrt: begin a session, with the prefix that is cached |
| StepBatch | StepBatchOk | zrt: one forward of many sessions |
| TruncateSession | SessionTruncated | zrt: forget a session's tokens from a place on |
| CloseSession | SessionClosed | zrt: end a session |
| QueryVram | VramInfo | memory of the rank's device |
| UnloadModel | Unloaded | drop the shard and its KV |
| RankShutdown (`shutdown`) | Bye | the process ends with status 0 |

GenerateStepWithImages, GenerateStepBatch, AssembleKvBatch, ExtractKvRows, SnapshotKvCache,
RestoreKvCache and DropKvSnapshot are understood and answered `unsupported`: a batch is zrt's
StepBatch, and cached prefixes are found by page keys.
"""

from msgspec import Struct

from zrt.runtime.messages.control import snake
from zrt.runtime.messages.header import U32, U64


class RankMessage(Struct, tag_field="op", tag=snake):
    """Base of the messages between a leader and its TP ranks."""


# ---- helexa's requests ---------------------------------------------------------------------------


class Ping(RankMessage):
    """Request for Pong, a sign of life."""


class Init(RankMessage):
    """Request to join the communicator: `comm_id` is 128 bytes as 256 hex digits (see
    compute/communicator.py). Blocks until all ranks have joined."""

    comm_id: str


class NcclSanityCheck(RankMessage):
    """Request to sum 1 over all ranks. `nccl_not_initialised` before Init."""


class LoadDenseShard(RankMessage):
    """Request to load this rank's slices of what AssignStage named. `config_json` is the text of
    the model's config.json.

    A `quant` other than None is `unsupported`.
    """

    model_id: str
    config_json: str
    safetensors_paths: list[str]
    quant: str | None = None


class GenerateStep(RankMessage):
    """Request to run `tokens` of the unnamed session from position `offset` on. Every rank gets the
    same tokens; the leader has the logits."""

    model_id: str
    tokens: list[U32]
    offset: U64


class GenerateStepWithImages(RankMessage):
    model_id: str
    tokens: list[U32]
    offset: U64
    image_token_id: U32
    image_data_uris: list[str]
    chunk_size: U64


class GenerateStepBatch(RankMessage):
    """Message of which only the name is documented."""


class AssembleKvBatch(RankMessage):
    model_id: str
    seqs: list[tuple[U64, U64]]


class ExtractKvRows(RankMessage):
    model_id: str
    rows: list[tuple[U64, U64]]
    padded_len: U64
    steps: U64
    snapshot_ids: list[U64]


class ClearKvCache(RankMessage):
    model_id: str


class SnapshotKvCache(RankMessage):
    model_id: str
    snapshot_id: U64


class RestoreKvCache(RankMessage):
    model_id: str
    snapshot_id: U64


class DropKvSnapshot(RankMessage):
    model_id: str
    snapshot_id: U64


class QueryVram(RankMessage):
    """Request for VramInfo."""


class UnloadModel(RankMessage):
    """Request to drop the shard. Steps are answered `model_not_loaded` afterwards. The communicator
    stays."""

    model_id: str


class RankShutdown(RankMessage, tag="shutdown"):
    """Request to end the process; answered by Bye."""


# ---- zrt's requests ------------------------------------------------------------------------------


class AssignStage(RankMessage):
    """Contents of the next LoadDenseShard: blocks first..last (inclusive, global) in `dtype`,
    `kv_bytes` of KV memory on this rank.

    `context` is the longest session in tokens, `sessions` the number of sessions open at once. With
    `random`, weights are drawn from the config, and LoadDenseShard names no files. `gpu_memory` is
    the part of a CUDA device's memory that weights and KV may take.
    """

    first: U64
    last: U64
    dtype: str
    kv_bytes: U64
    context: U64
    sessions: U64
    random: bool = False
    gpu_memory: float = 0.9


class OpenSession(RankMessage):
    """Request to make room for a session whose history has `length` tokens, the first
    `prompt_length` of them its prompt (0: all).

    `page_keys` name its full pages. All ranks are sent the same ops in the same order, so that
    their page pools are always alike.
    """

    session: U64
    length: U64
    prompt_length: U64 = 0
    page_keys: list[U64] = []


class RankStep(Struct, array_like=True):
    """One step of a StepBatch: `n` tokens of `session` from `seq_pos` on. With `logits`, the last
    token's logits are wanted.

    `opens` begins a session that was not opened before, with that many tokens in all.
    """

    session: U64
    seq_pos: U64
    n: U64
    logits: bool = False
    opens: U64 = 0


class StepBatch(RankMessage):
    """Request for one forward of many sessions. The rows of all steps lie one after the other.

    On the first stage the rows are `tokens`. On other stages they are hidden states in the assigned
    dtype, `shape` [rows, hidden]: from 16 KiB on a frame of their own, else `data` (base64 in the
    JSON). `best` says that every next token is the one with the greatest logit, so that a device
    may begin with it by itself.
    """

    steps: list[RankStep]
    tokens: list[U32] = []
    shape: list[U32] = []
    data: memoryview = memoryview(b"")
    best: bool = False


class TruncateSession(RankMessage):
    """Request to hold at most `length` tokens of a session."""

    session: U64
    length: U64


class CloseSession(RankMessage):
    """Request to end a session. Its full pages that have a key stay as cache; None: the keys that
    the session was opened with."""

    session: U64
    page_keys: list[U64] | None = None


# ---- helexa's responses --------------------------------------------------------------------------


class Pong(RankMessage):
    """Answer to Ping: `cuda_device` is the index of the rank's device, 0 on a CPU."""

    rank: U32
    world_size: U32
    cuda_device: U32


class InitOk(RankMessage):
    """Answer to Init: every rank has joined."""


class NcclSanityResult(RankMessage):
    """Answer to NcclSanityCheck: the sum, which is the number of ranks if all is well."""

    observed_sum: U32


class LoadDenseShardOk(RankMessage):
    """Answer to LoadDenseShard: the shard is ready for steps."""


class GenerateStepOk(RankMessage):
    """Answer to GenerateStep: the step has run."""


class KvCacheCleared(RankMessage):
    """Answer to ClearKvCache: the unnamed session is empty."""


class KvBatchAssembled(RankMessage):
    padded_len: U64


class KvRowsExtracted(RankMessage):
    bytes: U64


class VramInfo(RankMessage):
    """Answer to QueryVram: memory of the rank's device in MiB; on a CPU, the machine's."""

    free_mb: U64
    total_mb: U64


class KvSnapshotStored(RankMessage):
    bytes: U64


class KvCacheRestored(RankMessage):
    """Documented answer to RestoreKvCache; zrt's ranks never send it."""


class KvSnapshotDropped(RankMessage):
    """Documented answer to DropKvSnapshot; zrt's ranks never send it."""


class Unloaded(RankMessage):
    """Answer to UnloadModel: no model is loaded any more."""


class Bye(RankMessage):
    """Answer to RankShutdown, the last message of a rank."""


class RankError(RankMessage, tag="error"):
    """Failure of a request; `kind` is one of errors.KINDS."""

    kind: str
    message: str


# ---- zrt's responses -----------------------------------------------------------------------------


class StageAssigned(RankMessage):
    """Answer to AssignStage: LoadDenseShard may follow."""


class SessionOpened(RankMessage):
    """Answer to OpenSession: how many tokens of the session are held."""

    have: U64


class StepBatchOk(RankMessage):
    """Answer to StepBatch. `have` is the number of tokens held of each step's session afterwards;
    `faults` the error's kind of each step, empty for steps that ran.

    `forward_us` is the time that the forward took.
    """

    have: list[U64]
    faults: list[str]
    forward_us: U64


class SessionTruncated(RankMessage):
    have: U64


class SessionClosed(RankMessage):
    """Answer to CloseSession: the session is not held any more, if it was."""


WorkerRequest = (
    Ping
    | Init
    | NcclSanityCheck
    | LoadDenseShard
    | GenerateStep
    | GenerateStepWithImages
    | GenerateStepBatch
    | AssembleKvBatch
    | ExtractKvRows
    | ClearKvCache
    | SnapshotKvCache
    | RestoreKvCache
    | DropKvSnapshot
    | QueryVram
    | UnloadModel
    | RankShutdown
    | AssignStage
    | OpenSession
    | StepBatch
    | TruncateSession
    | CloseSession
)
WorkerResponse = (
    Pong
    | InitOk
    | NcclSanityResult
    | LoadDenseShardOk
    | GenerateStepOk
    | KvCacheCleared
    | KvBatchAssembled
    | KvRowsExtracted
    | VramInfo
    | KvSnapshotStored
    | KvCacheRestored
    | KvSnapshotDropped
    | Unloaded
    | Bye
    | RankError
    | StageAssigned
    | SessionOpened
    | StepBatchOk
    | SessionTruncated
    | SessionClosed
)
