"""The few operations that decide speed, each with a plain-JAX reference that every other version is tested against."""
