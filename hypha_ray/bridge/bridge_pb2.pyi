from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("version", "sequence", "session", "hello", "challenge", "authenticate", "welcome", "job", "ready", "parameters", "assignment", "merged", "metrics", "evaluation", "update", "leave", "left", "done", "file", "alive", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: int
    sequence: int
    session: bytes
    hello: Hello
    challenge: Challenge
    authenticate: Authenticate
    welcome: Welcome
    job: JobDefinition
    ready: Ready
    parameters: Parameters
    assignment: Assignment
    merged: Merged
    metrics: MetricSet
    evaluation: Evaluation
    update: Update
    leave: Leave
    left: Left
    done: Done
    file: File
    alive: Alive
    error: Error
    def __init__(self, version: _Optional[int] = ..., sequence: _Optional[int] = ..., session: _Optional[bytes] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., authenticate: _Optional[_Union[Authenticate, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., job: _Optional[_Union[JobDefinition, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., parameters: _Optional[_Union[Parameters, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., merged: _Optional[_Union[Merged, _Mapping]] = ..., metrics: _Optional[_Union[MetricSet, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., file: _Optional[_Union[File, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class MetricSet(_message.Message):
    __slots__ = ("items", "data_processed", "local_round")
    class ItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DATA_PROCESSED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ROUND_FIELD_NUMBER: _ClassVar[int]
    items: _containers.ScalarMap[str, float]
    data_processed: int
    local_round: int
    def __init__(self, items: _Optional[_Mapping[str, float]] = ..., data_processed: _Optional[int] = ..., local_round: _Optional[int] = ...) -> None: ...

class WeightUpdate(_message.Message):
    __slots__ = ("model_path",)
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    def __init__(self, model_path: _Optional[str] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("size", "sha256")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    size: int
    sha256: bytes
    def __init__(self, size: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("name", "nonce", "shares_files")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FILES_FIELD_NUMBER: _ClassVar[int]
    name: str
    nonce: bytes
    shares_files: bool
    def __init__(self, name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., shares_files: _Optional[bool] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("session", "nonce")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    nonce: bytes
    def __init__(self, session: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Authenticate(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("proof", "silence_s")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    silence_s: float
    def __init__(self, proof: _Optional[bytes] = ..., silence_s: _Optional[float] = ...) -> None: ...

class JobDefinition(_message.Message):
    __slots__ = ("path", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: Content
    def __init__(self, path: _Optional[str] = ..., content: _Optional[_Union[Content, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("device", "parameters")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    device: str
    parameters: int
    def __init__(self, device: _Optional[str] = ..., parameters: _Optional[int] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ("round", "update", "content")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    update: WeightUpdate
    content: Content
    def __init__(self, round: _Optional[int] = ..., update: _Optional[_Union[WeightUpdate, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ...) -> None: ...

class Merged(_message.Message):
    __slots__ = ("round", "seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    seconds: float
    def __init__(self, round: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("path", "samples", "content")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    path: str
    samples: int
    content: Content
    def __init__(self, path: _Optional[str] = ..., samples: _Optional[int] = ..., content: _Optional[_Union[Content, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("round", "version", "batch_size", "train", "evaluate", "gradient", "learning_rate", "last_learning_rate")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LAST_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    version: int
    batch_size: int
    train: _containers.RepeatedCompositeFieldContainer[Slice]
    evaluate: _containers.RepeatedCompositeFieldContainer[Slice]
    gradient: bool
    learning_rate: float
    last_learning_rate: float
    def __init__(self, round: _Optional[int] = ..., version: _Optional[int] = ..., batch_size: _Optional[int] = ..., train: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., evaluate: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., gradient: _Optional[bool] = ..., learning_rate: _Optional[float] = ..., last_learning_rate: _Optional[float] = ...) -> None: ...

class Figure(_message.Message):
    __slots__ = ("total", "weight")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    total: float
    weight: float
    def __init__(self, total: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("round", "loss_sum", "count", "correct", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Figure
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Figure, _Mapping]] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    round: int
    loss_sum: float
    count: int
    correct: int
    figures: _containers.MessageMap[str, Figure]
    def __init__(self, round: _Optional[int] = ..., loss_sum: _Optional[float] = ..., count: _Optional[int] = ..., correct: _Optional[int] = ..., figures: _Optional[_Mapping[str, Figure]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("round", "update", "content", "samples", "tokens", "batches", "loss")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    round: int
    update: WeightUpdate
    content: Content
    samples: int
    tokens: int
    batches: int
    loss: float
    def __init__(self, round: _Optional[int] = ..., update: _Optional[_Union[WeightUpdate, _Mapping]] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., batches: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class File(_message.Message):
    __slots__ = ("path", "size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
