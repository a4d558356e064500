"""Sets the number of generated inputs: a few fixed ones in the default run; 10,000 random ones in `make fuzz`."""

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
settings.register_profile("short", max_examples=25, derandomize=True, **COMMON)
settings.register_profile("long", max_examples=200, print_blob=True, **COMMON)
settings.load_profile("short")
