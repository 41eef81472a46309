# The load generator: Locust, the user classes, the recorder, and the embedded engine. Nothing of a server's.
#   make image        builds amd-llm-load:local, which `generator: container` and `harness compose` use
# Another base with Python 3.11 or newer: docker build --build-arg BASE=...
ARG BASE=python:3.11-slim
FROM ${BASE}

WORKDIR /opt/amd-llm-load
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY harness/__init__.py harness/__init__.py
# Dependencies first, so that a change of our own code does not install them again.
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt --editable . \
    && useradd --uid 10000 --create-home loadtest

COPY harness harness
COPY locustfiles locustfiles
COPY compose compose
COPY scenarios scenarios

USER 10000
ENV PYTHONUNBUFFERED=1
EXPOSE 8089
CMD ["python3", "-m", "locust", "--help"]
