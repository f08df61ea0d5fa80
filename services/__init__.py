"""The processes: bus, engine, prefill, decode, gateway, CLI, supervisor, configuration, telemetry."""
