"""Frames that clients of a Live session send."""

from __future__ import annotations

from typing import Any

from .gemini_schemas import (
    Anything,
    Content,
    FunctionResponse,
    GenerationConfig,
    Message,
    Messages,
    SafetySetting,
    Tool,
)


class SessionResumption(Message):
    handle: str | None = None
    transparent: bool | None = None


class ActivityDetection(Message):
    disabled: bool | None = None
    start_of_speech_sensitivity: Any = None
    end_of_speech_sensitivity: Any = None
    prefix_padding_ms: Any = None
    silence_duration_ms: Any = None


class RealtimeInputConfig(Message):
    automatic_activity_detection: ActivityDetection | None = None
    activity_handling: str | None = None
    turn_coverage: str | None = None


class HistoryConfig(Message):
    """`initial_history_in_client_content`: what `client_content` says until its turn is complete is history, not asked
    for an answer."""

    initial_history_in_client_content: bool | None = None


class Setup(Message):
    model: str | None = None
    generation_config: GenerationConfig | None = None
    system_instruction: Content | None = None
    tools: Messages[Tool] | None = None
    session_resumption: SessionResumption | None = None
    realtime_input_config: RealtimeInputConfig | None = None
    history_config: HistoryConfig | None = None
    safety_settings: Messages[SafetySetting] | None = None
    labels: Anything | None = None
    context_window_compression: Anything | None = None
    input_audio_transcription: Anything | None = None
    output_audio_transcription: Anything | None = None
    proactivity: Anything | None = None
    explicit_vad_signal: Any = None
    avatar_config: Any = None


class ClientContent(Message):
    turns: Messages[Content] | None = None
    turn_complete: bool | None = None


class RealtimeInput(Message):
    text: str | None = None
    activity_start: Anything | None = None
    activity_end: Anything | None = None
    audio_stream_end: bool | None = None
    audio: Anything | None = None
    video: Anything | None = None
    media_chunks: Any = None


class ToolResponse(Message):
    function_responses: Messages[FunctionResponse] | None = None


class ClientFrame(Message):
    """One of these."""

    setup: Setup | None = None
    client_content: ClientContent | None = None
    realtime_input: RealtimeInput | None = None
    tool_response: ToolResponse | None = None
