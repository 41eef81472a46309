# The harness and its load generator: `harness quick URL` and the like, Locust with the user classes and the recorder,
# and the embedded engine. Nothing of a server's.
#   make image        builds amd-llm-load:local, which `generator: container` and `harness compose` use
#   docker run --rm --network host amd-llm-load:local harness quick http://127.0.0.1:8000
# Another base with Python 3.11 or newer: docker build --build-arg BASE=...
ARG BASE=python:3.11-slim
FROM ${BASE}

WORKDIR /opt/amd-llm-load
COPY requirements/run.txt ./
RUN python3 -m pip install --no-cache-dir --require-hashes --requirement run.txt \
    && printf '#!/bin/sh\nexec python3 -m harness "$@"\n' > /usr/local/bin/harness && chmod +x /usr/local/bin/harness \
    && useradd --uid 10000 --create-home loadtest

COPY LICENSE ./
COPY harness harness
COPY locustfiles locustfiles
COPY scenarios scenarios
COPY compose compose
COPY results/reference results/reference

# Runs are written into the home of the user, or into a folder that is mounted there.
USER 10000
WORKDIR /home/loadtest
ENV PYTHONPATH=/opt/amd-llm-load PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Locust's web UI. It listens on 127.0.0.1 of the container unless --web-host says otherwise: docs/live.md, "Access".
EXPOSE 8089
CMD ["harness", "--help"]
