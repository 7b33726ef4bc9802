"""Requests made from the OpenAPI description: none is answered with what the description does not have."""

from __future__ import annotations

import subprocess
import sys

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

SAME = r"^/v1alpha/|^/v1/(interactions|cachedContents|\{model\}:)"
"""Paths that are the same as those of v1beta."""


def test_requests_made_from_the_description(api, tmp_path):
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{api.url}/openapi.json", "--checks", CHECKS,
        "--phases", "fuzzing", "--max-examples", "2", "--generation-database", "none", "--seed", "7",
        "--exclude-path-regex", SAME, "--request-timeout", "30",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "failed" not in done.stdout.rpartition("Test cases:")[2]
