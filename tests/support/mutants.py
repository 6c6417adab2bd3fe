"""Messages that no zrt process would send: every type of the protocol, filled at random and then
spoilt, as a tree of values or as bytes."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec
import msgspec.inspect as shape_of

from zrt.runtime.messages.client import ClientRequest
from zrt.runtime.messages.header import PROTOCOL
from zrt.runtime.wire.clients import decode_client
from zrt.runtime.wire.decode_errors import WireError
from zrt.runtime.wire.envelopes import ControlMessage, decode
from zrt.runtime.wire.inference import decode_inference

Kind = Literal["client", "control", "step", "bare"]
CLIENT = {kind.__name__: kind for kind in get_args(ClientRequest)}
CONTROL = {kind.__name__: kind for kind in get_args(ControlMessage)}
ORDERS = frozenset({"Assign", "Shutdown", "Kill"})
"""Messages whose receivers obey whoever speaks as the coordinator: not sent in its name."""
OBEYED = frozenset({"Down", "Drain", "Restart"})
"""Requests that any client may make, and that would be obeyed: not sent whole."""
HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 127, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"),
    float("inf"), "", "\0", "x" * 3000, "tcp://127.0.0.1:1", "tcp://[", "../../etc", b"", b"\xff" * 9, [], {}, [[]], [None] * 300, {"type": "done"},
]  # fmt: skip
LENGTHS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 5000,
    b"\xc1",
]


@dataclass
class Speaker:
    """The sender that a mutant claims, and what it knows: sessions by (id, epoch), and the
    incarnations of those it speaks to."""

    name: str = "stranger"
    incarnation: int = 9
    sessions: list[tuple[int, int]] = field(default_factory=list)
    orders: bool = True


@dataclass
class Mutant:
    """A spoilt message, with its `frames` as they are sent. `header`: its header can be read (for a
    bare message, which has none: it decodes); `whole`: all of it decodes."""

    kind: Kind
    type: str
    frames: list[bytes]
    header: bool
    whole: bool


class Mutants:
    """An endless source of mutants; `seen`, `headers` and `whole` count them by type."""

    def __init__(self, rng: random.Random, speaker: Speaker, *, vocab: int = 160, hidden: int = 64) -> None:
        self.rng = rng
        self.speaker = speaker
        self.seen: Counter[str] = Counter()
        self.headers: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()
        self._vocab = vocab
        self._hidden = hidden

    def next(self, kinds: tuple[Kind, ...]) -> Mutant:
        while True:
            kind = self.rng.choice(kinds)
            make: Callable[[], Mutant | None] = {
                "client": self._client, "control": self._control, "step": self._step, "bare": self._bare
            }[kind]  # fmt: skip
            mutant = make()
            if mutant is not None:
                self.seen[mutant.type] += 1
                self.headers[mutant.type] += mutant.header
                self.whole[mutant.type] += mutant.whole
                return mutant

    # ---- one of each kind ------------------------------------------------------------------------

    def _client(self) -> Mutant | None:
        name = self.rng.choice(list(CLIENT))
        tree = self._tree(CLIENT[name])
        if name == "Generate":
            tree |= {"prompt": None, "messages": None, "max_tokens": self.rng.choice([1, 3, 9, 2**40]), "raw": False}
            tree["token_ids"] = [self.rng.randrange(self._vocab) for _ in range(self.rng.randint(1, 40))]
            tree |= {"n": self.rng.randint(1, 3), "logit_bias": {}, "stop_token_ids": [], "stop": [], "min_tokens": 0}
        frame = self._packed(self._spoilt(tree))
        whole = _takes(decode_client, frame)
        if whole and type(decode_client(frame)).__name__ in OBEYED:
            return None
        return Mutant("client", name, [frame], whole, whole)

    def _control(self) -> Mutant | None:
        name = self.rng.choice(list(CONTROL))
        if not self.speaker.orders and name in ORDERS:
            return None
        tree = self._tree(CONTROL[name])
        if self.rng.random() < 0.7:
            session, epoch = self._session()
            tree |= {key: value for key, value in (("session", session), ("epoch", epoch)) if key in tree}
            if "tokens" in tree and isinstance(tree["tokens"], list) and name == "Sampled":
                tree["tokens"] = [[session, epoch, self.rng.randint(0, 50), 7, [], None]]
        if name == "Open" and self.rng.random() < 0.7:
            tree |= {"stage": 0, "length": 5, "tokens": [1, 2, 3, 4, 5], "prompt_length": 5, "page_keys": []}
            tree["route"] = [[self.speaker.name, self.speaker.incarnation, "tcp://127.0.0.1:1"]]
        header = self._header("control")
        return self._multipart("control", name, header, [self._packed(self._spoilt(tree))])

    def _step(self) -> Mutant:
        rng = self.rng
        steps, rows = [], 0
        for _ in range(rng.choice([1, 1, 2, 5])):
            session, epoch = self._session()
            position = rng.choice([0, 0, 1, 5, 2**20, 2**32 - 20])
            n = rng.randint(1, 6)
            rows += n
            steps.append([session, epoch, position, n, rng.randint(0, 3), rng.choice([-1, 0, 1]), []])
        tokens = rng.random() < 0.5
        shape = [rows] if tokens else [1, rows, self._hidden]
        size = rows * 4 if tokens else rows * self._hidden * 4
        data = rng.randbytes(size) if rng.random() < 0.5 else bytes(size)
        tree = {
            "session_id": steps[0][0], "seq_pos": steps[0][2], "payload_type": "token_ids" if tokens else "hidden_states",
            "shape": shape, "data": data,
        }  # fmt: skip
        header = self._header("inference")
        header[9:] = ["uint32" if tokens else rng.choice(["float32"] * 8 + ["float16", "bfloat16"]), steps]
        if rng.random() < 0.3:
            return self._multipart("step", "InferenceRequest", header, [self._packed(tree | {"data": b""}), data])
        return self._multipart("step", "InferenceRequest", header, [self._packed(self._spoilt(tree))])

    def _bare(self) -> Mutant:
        rng = self.rng
        n = rng.choice([1, 1, 2, 7, 40])
        tokens = rng.random() < 0.5
        data = b"".join(rng.randrange(self._vocab + 2).to_bytes(4, "little") for _ in range(n))
        if not tokens:
            data = rng.choice(
                [bytes(2 * n * self._hidden), rng.randbytes(2 * n * self._hidden), b"\x00\x7e" * n * self._hidden]
            )
        tree = {
            "session_id": rng.randrange(2**64), "seq_pos": rng.choice([0, 0, 0, 1, 2**32 - 1]),
            "payload_type": "token_ids" if tokens else "hidden_states",
            "shape": [n] if tokens else [1, n, self._hidden], "data": list(data) if rng.random() < 0.3 else data,
        }  # fmt: skip
        frame = self._packed(self._spoilt(tree))
        whole = _takes(decode_inference, frame)
        return Mutant("bare", "bare InferenceRequest", [frame], whole, whole)

    # ---- parts -----------------------------------------------------------------------------------

    def _session(self) -> tuple[int, int]:
        sessions = self.speaker.sessions
        if sessions and self.rng.random() < 0.7:
            return self.rng.choice(sessions)
        return self.rng.randint(1, 40), self.rng.randint(0, 3)

    def _header(self, body: str) -> list[Any]:
        rng, speaker = self.rng, self.speaker
        asks = rng.choice([0, rng.randrange(2**32)])
        return [PROTOCOL, speaker.name, speaker.incarnation, 0, asks, rng.random() < 0.05, "", 0, body, "", []]

    def _multipart(self, kind: Kind, name: str, header: list[Any], rest: list[bytes]) -> Mutant:
        if self.rng.random() < 0.25:
            header = self._spoilt(header)
        frames = [self._packed(header), *rest]
        if self.rng.random() < 0.03:
            frames = self.rng.choice([frames[::-1], frames * 2, [*frames, b""], [b"", *frames]])
        try:
            decode(frames)
        except WireError as error:
            return Mutant(kind, name, frames, error.header is not None, False)
        return Mutant(kind, name, frames, True, True)

    def _tree(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        fields: dict[str, Any] = self._value(shape_of.type_info(struct), 0)
        return {"type": struct.__struct_config__.tag} | fields

    def _value(self, kind: Any, depth: int) -> Any:
        rng = self.rng
        match kind:
            case shape_of.StructType():
                values = {field.encode_name: self._value(field.type, depth + 1) for field in kind.fields}
                return list(values.values()) if kind.array_like else values
            case shape_of.ListType():
                return [self._value(kind.item_type, depth + 1) for _ in range(rng.randint(kind.min_length or 0, 2))]
            case shape_of.DictType():
                return {}
            case shape_of.UnionType():
                return self._value(rng.choice(kind.types), depth + 1)
            case shape_of.LiteralType():
                return rng.choice(kind.values)
            case shape_of.IntType():
                return max(kind.ge or 0, rng.choice([1, 2, 3, 9, 70]))
            case shape_of.FloatType():
                return 0.5 if kind.gt is not None or kind.ge else 0.0
            case shape_of.StrType():
                return rng.choice(["a", "b", "stage0", "tcp://127.0.0.1:1", str(rng.randrange(10**6))])
            case shape_of.BoolType():
                return rng.random() < 0.5
            case shape_of.MemoryViewType():
                return b""
            case shape_of.NoneType():
                return None
        raise NotImplementedError(f"{kind}: the wire carries no such type yet")

    # ---- damage ----------------------------------------------------------------------------------

    def _spoilt(self, tree: Any) -> Any:
        """Return the tree with none to three of its values changed, taken out, repeated or
        buried."""
        for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
            tree = self._change(tree)
        return tree

    def _change(self, tree: Any) -> Any:
        rng = self.rng
        if isinstance(tree, dict | list) and tree and rng.random() < 0.9:
            key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
            tree = tree.copy()
            match rng.randrange(6):
                case 0:
                    del tree[key]
                case 1 if isinstance(tree, list):
                    tree.insert(key, tree[key])
                case 2 if isinstance(tree, dict):
                    tree[rng.choice(["x", "type", "id", "session"])] = rng.choice(HOSTILE)
                case _:
                    tree[key] = self._change(tree[key])
            return tree
        return [[tree]] if rng.random() < 0.05 else rng.choice(HOSTILE)

    def _packed(self, tree: Any) -> bytes:
        """Return the tree as MessagePack, one time in eight with some of its bytes changed."""
        rng = self.rng
        frame = msgspec.msgpack.encode(tree)
        if rng.random() < 0.875:
            return frame
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(4):
            case 0:
                return frame[:at]
            case 1:
                return frame[:at] + rng.randbytes(rng.randint(1, 4)) + frame[at:]
            case 2:
                return frame[:at] + rng.choice(LENGTHS) + frame[at:]
        return frame[:at] + rng.randbytes(1) + frame[at + 1 :]


def _takes(reader: Callable[[bytes], object], frame: bytes) -> bool:
    try:
        reader(frame)
    except WireError:
        return False
    return True
