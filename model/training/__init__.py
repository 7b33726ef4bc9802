"""Training of shadow networks: prompts, the trunk's own answers, fitting, calibration, report."""
