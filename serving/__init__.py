"""The engine and the server around it."""
