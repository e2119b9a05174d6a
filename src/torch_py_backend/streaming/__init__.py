"""Responses of decoupled models: one stream per request, and continuous batching."""
