from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "has_tokenizer", "has_chat_template", "default_temperature", "default_top_k", "default_top_p")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TOP_K_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TOP_P_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    has_chat_template: bool
    default_temperature: float
    default_top_k: int
    default_top_p: float
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., default_temperature: _Optional[float] = ..., default_top_k: _Optional[int] = ..., default_top_p: _Optional[float] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "uptime_s", "draining", "tensor_parallel_size", "instances", "limits")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    draining: bool
    tensor_parallel_size: int
    instances: _containers.RepeatedCompositeFieldContainer[InstanceInfo]
    limits: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., draining: _Optional[bool] = ..., tensor_parallel_size: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[InstanceInfo, _Mapping]]] = ..., limits: _Optional[_Mapping[str, float]] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("name", "page_size", "total_pages", "max_running", "max_model_len", "max_batch_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    total_pages: int
    max_running: int
    max_model_len: int
    max_batch_tokens: int
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., total_pages: _Optional[int] = ..., max_running: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("instances", "live_requests", "homeless_requests")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOMELESS_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceLoad]
    live_requests: int
    homeless_requests: int
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceLoad, _Mapping]]] = ..., live_requests: _Optional[int] = ..., homeless_requests: _Optional[int] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("name", "healthy", "running", "waiting", "waiting_tokens", "max_running", "live_pages", "cached_pages", "free_pages", "total_pages", "page_size", "token_usage", "batch_fill", "generation_throughput", "cache_hit_rate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    LIVE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_USAGE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FILL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    healthy: bool
    running: int
    waiting: int
    waiting_tokens: int
    max_running: int
    live_pages: int
    cached_pages: int
    free_pages: int
    total_pages: int
    page_size: int
    token_usage: float
    batch_fill: float
    generation_throughput: float
    cache_hit_rate: float
    def __init__(self, name: _Optional[str] = ..., healthy: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., live_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., token_usage: _Optional[float] = ..., batch_fill: _Optional[float] = ..., generation_throughput: _Optional[float] = ..., cache_hit_rate: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("live_requests",)
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    live_requests: int
    def __init__(self, live_requests: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("flushed_pages",)
    FLUSHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    flushed_pages: int
    def __init__(self, flushed_pages: _Optional[int] = ...) -> None: ...

class ReloadSchedulesRequest(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...

class ReloadSchedulesResponse(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[ServedSchedule]
    def __init__(self, schedules: _Optional[_Iterable[_Union[ServedSchedule, _Mapping]]] = ...) -> None: ...

class ServedSchedule(_message.Message):
    __slots__ = ("name", "batch_tokens", "decode_share", "mean_context", "gain", "is_chosen")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEAN_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    batch_tokens: int
    decode_share: float
    mean_context: float
    gain: float
    is_chosen: bool
    def __init__(self, name: _Optional[str] = ..., batch_tokens: _Optional[int] = ..., decode_share: _Optional[float] = ..., mean_context: _Optional[float] = ..., gain: _Optional[float] = ..., is_chosen: _Optional[bool] = ...) -> None: ...
