"""The part of a TP rank that its executor runs: joining the group, loading, stepping. Runs in one
thread at a time; every call blocks."""

import time
from collections.abc import Hashable
from pathlib import Path

import torch

from zrt.runtime.compute.collectives.communicator import Communicator, join
from zrt.runtime.compute.engine import Engine
from zrt.runtime.compute.loading import EngineOptions, read_engine
from zrt.runtime.compute.tensors import DTYPES, from_bytes
from zrt.runtime.compute.turn import TurnResult, Work
from zrt.runtime.compute.weight_sources import Checkpoint, RandomCheckpoint
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.ranks import (
    AssignStage,
    ClearKvCache,
    CloseSession,
    GenerateStep,
    GenerateStepOk,
    Init,
    InitOk,
    KvCacheCleared,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    OpenSession,
    RankStep,
    SessionClosed,
    SessionOpened,
    SessionTruncated,
    StageAssigned,
    StepBatch,
    StepBatchOk,
    TruncateSession,
    Unloaded,
    UnloadModel,
    WorkerRequest,
    WorkerResponse,
)
from zrt.runtime.models.architecture.config_json import parse_config
from zrt.runtime.models.architecture.spec import spec_from_config


class Rank:
    """Rank `rank` of a group of `world`, on `device`: its communicator, its stage and its
    engine."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device(device)
        self._group: Communicator | None = None
        self._stage: AssignStage | None = None
        self._engine: Engine | None = None

    def serve(self, request: WorkerRequest, session: Hashable) -> WorkerResponse:
        """Return the response to a request; `session` is the one that helexa's own steps act on.
        ZrtError: the error that the rank answers instead."""
        match request:
            case Init():
                return self._init(request)
            case NcclSanityCheck():
                return NcclSanityResult(self._joined().sum_of_ones())
            case AssignStage():
                return self._assign(request)
            case LoadDenseShard():
                return self._load(request)
            case GenerateStep():
                return self._generate(request, session)
            case ClearKvCache():
                self._loaded().close(session)
                return KvCacheCleared()
            case OpenSession():
                return SessionOpened(
                    self._loaded().open(request.session, request.length, request.page_keys, request.prompt_length)
                )
            case StepBatch():
                return self._step(request)
            case TruncateSession():
                return SessionTruncated(self._loaded().truncate(request.session, request.length))
            case CloseSession():
                self._loaded().close(request.session, request.page_keys)
                return SessionClosed()
            case UnloadModel():
                self._unload()
                self._stage = None
                return Unloaded()
            case _:
                op = type(request).__struct_config__.tag
                raise ZrtError(
                    "unsupported", f"{op} is not supported: a batch is step_batch, and prefixes are found by page keys"
                )

    def _joined(self) -> Communicator:
        if self._group is None:
            raise ZrtError("nccl_not_initialised", "init comes first: this rank has joined no group")
        return self._group

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise ZrtError("model_not_loaded", "no model is loaded: assign_stage and load_dense_shard come first")
        return self._engine

    def _init(self, request: Init) -> WorkerResponse:
        self._unload()  # it computes with the group before
        if self._group is not None:
            self._group.abort()
        self._group = join(request.comm_id, self.rank, self.world, self.device)
        return InitOk()

    def _unload(self) -> None:
        if self._engine is not None:
            self._engine.end()
        self._engine = None

    def _assign(self, request: AssignStage) -> WorkerResponse:
        if request.dtype not in DTYPES or request.dtype == "uint32":
            raise ZrtError("bad_request", f"assign_stage: dtype {request.dtype!r} is none of a model's")
        self._stage = request
        return StageAssigned()

    def _load(self, request: LoadDenseShard) -> WorkerResponse:
        group, stage = self._joined(), self._stage
        if request.quant is not None:
            raise ZrtError("unsupported", f"quant {request.quant!r} is not supported: weights are loaded as they are")
        if stage is None:
            raise ZrtError("bad_request", "assign_stage comes before load_dense_shard")
        if stage.random and request.safetensors_paths:
            raise ZrtError("bad_request", "random weights are drawn from the config: no files go with them")
        self._unload()
        spec = spec_from_config(parse_config(request.config_json))
        source = RandomCheckpoint(spec) if stage.random else Checkpoint.of(map(Path, request.safetensors_paths))
        self._engine = read_engine(
            spec,
            source,
            (stage.first, stage.last),
            EngineOptions(
                dtype=DTYPES[stage.dtype],
                kv_bytes=stage.kv_bytes,
                context=stage.context,
                sessions=stage.sessions,
                device=str(self.device),
                gpu_memory=stage.gpu_memory,
            ),
            group=group,
        )
        return LoadDenseShardOk()

    def _generate(self, request: GenerateStep, session: Hashable) -> WorkerResponse:
        engine = self._loaded()
        count = len(request.tokens)
        if not count or not engine.shard.is_first:
            raise ZrtError("bad_request", "generate_step: the first stage takes one token or more")
        rows = torch.tensor(request.tokens)
        opens = 0 if request.offset else count
        work = Work(session, request.offset, count, rows, logits=engine.shard.is_last, opens=opens)
        fault = engine.turn([work]).outcomes[0].fault
        if fault is not None:
            raise fault
        return GenerateStepOk()

    def _step(self, request: StepBatch) -> WorkerResponse:
        engine = self._loaded()
        rows = sum(step.n for step in request.steps)
        if not request.steps or not all(step.n for step in request.steps):
            raise ZrtError("bad_request", "step_batch: expected at least one step, and one token in each")
        is_first = engine.shard.is_first
        x = torch.tensor(request.tokens) if is_first else from_bytes(request.data, engine.dtype, request.shape)
        if len(x) != rows:
            raise ZrtError("bad_request", f"step_batch: {len(x)} rows for steps of {rows} tokens")
        started = time.perf_counter_ns()
        result = engine.turn(works_of(request.steps, x, best=request.best))
        return step_response(result, (time.perf_counter_ns() - started) // 1000)


def works_of(steps: list[RankStep], x: torch.Tensor, *, best: bool = False) -> list[Work]:
    """Return the works of a batch's steps, each with its rows of `x`; `best` is that of
    StepBatch."""
    works, start = [], 0
    for step in steps:
        rows = x[start : start + step.n]
        works.append(Work(step.session, step.seq_pos, step.n, rows, logits=step.logits, opens=step.opens, best=best))
        start += step.n
    return works


def step_response(result: TurnResult, forward_us: int) -> StepBatchOk:
    """Return a rank's response to a turn; two ranks that respond differently to the same turn hold
    different KV."""
    faults = [outcome.fault.kind if outcome.fault is not None else "" for outcome in result.outcomes]
    return StepBatchOk([outcome.have for outcome in result.outcomes], faults, forward_us)
