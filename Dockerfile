# The load generator: Locust, the user classes, the recorder, and the embedded engine. Nothing of a server's.
#   make image        builds amd-llm-load:local, which `generator: container` and `harness compose` use
# Another base with Python 3.11 or newer: docker build --build-arg BASE=...
ARG BASE=python:3.11-slim
FROM ${BASE}

WORKDIR /opt/amd-llm-load
# Only what harness.load and harness.simulated import: the rest of the harness stays on the host.
COPY requirements/image.txt ./
RUN python3 -m pip install --no-cache-dir --require-hashes --requirement image.txt \
    && useradd --uid 10000 --create-home loadtest

COPY LICENSE ./
COPY harness harness
COPY locustfiles locustfiles

USER 10000
ENV PYTHONPATH=/opt/amd-llm-load PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Locust's web UI. It listens on 127.0.0.1 of the container unless --web-host says otherwise: docs/live.md, "Access".
EXPOSE 8089
CMD ["python3", "-m", "locust", "--help"]
