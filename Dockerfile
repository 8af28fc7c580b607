# The daemon's image. vLLM has an image of its own; its connector is `pip install vllm-kvd` there.
#
#   docker build -t kvd .                               CPU engines
#   docker build -t kvd:cuda --build-arg VARIANT=cuda . on NVIDIA's base (no GPU transport yet)
#
# Run it as the user that vLLM runs as: memory is shared between processes of one user only.
ARG VARIANT=cpu

FROM python:3.12.12-slim-bookworm AS base-cpu

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base-cuda
# The distribution's Python follows its security updates; its version is Ubuntu 24.04's 3.12.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM base-${VARIANT} AS build
WORKDIR /src
# What the daemon needs, before its code: this layer stays when only the code changes. torch is not
# among it, since only the connector inside vLLM uses that.
COPY deploy/docker/requirements.txt ./
RUN python3 -m venv /opt/kvd \
    && /opt/kvd/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements.txt \
    && /opt/kvd/bin/pip install --no-cache-dir --disable-pip-version-check "hatchling>=1.26"
COPY pyproject.toml README.md LICENSE ./
COPY kvd kvd
COPY connector_shim connector_shim
RUN /opt/kvd/bin/pip install --no-cache-dir --disable-pip-version-check \
        --no-deps --no-build-isolation . \
    && /opt/kvd/bin/pip uninstall --yes hatchling \
    && /opt/kvd/bin/kvd version

# hadolint ignore=DL3006
FROM base-${VARIANT}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="kvd" \
      org.opencontainers.image.description="Moves vLLM's KV cache between prefill and decode engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY --from=build /opt/kvd /opt/kvd
RUN install -d -o 65532 -g 65532 -m 0700 /run/kvd
ENV PATH=/opt/kvd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KVD_SOCKET=/run/kvd/kvd.sock \
    KVD_LOG_FORMAT=json
USER 65532:65532
VOLUME /run/kvd
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["kvd", "healthcheck"]
ENTRYPOINT ["kvd"]
CMD ["serve"]
