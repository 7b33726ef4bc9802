"""Choices as data: trunks, sizes of the engine, settings of the server, prompts. No logic beyond validation."""
