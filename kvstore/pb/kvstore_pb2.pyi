from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
TIER_NONE: Tier
TIER_CPU: Tier
TIER_SSD: Tier

class AttachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("boot_id", "arena_path", "arena_bytes", "lease_s", "max_payload_bytes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    arena_path: str
    arena_bytes: int
    lease_s: float
    max_payload_bytes: int
    def __init__(self, boot_id: _Optional[str] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., lease_s: _Optional[float] = ..., max_payload_bytes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("boot_id", "tiers")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, boot_id: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("boot_id", "num_keys")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    num_keys: int
    def __init__(self, boot_id: _Optional[str] = ..., num_keys: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "wait_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    wait_ms: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("offset", "payload_bytes", "tier")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    offset: int
    payload_bytes: int
    tier: Tier
    def __init__(self, offset: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("boot_id", "lease_id", "blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    lease_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, boot_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("keys", "payload_bytes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    payload_bytes: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("boot_id", "lease_id", "offsets")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    lease_id: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("boot_id", "num_visible")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_VISIBLE_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    num_visible: int
    def __init__(self, boot_id: _Optional[str] = ..., num_visible: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class ReportCorruptRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReportCorruptResponse(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("boot_id", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    values: _containers.ScalarMap[str, int]
    def __init__(self, boot_id: _Optional[str] = ..., values: _Optional[_Mapping[str, int]] = ...) -> None: ...
