# One image for every service of Tokenbus; what it runs is the command that follows `tokenbus`.

FROM python:3.12.8-slim-bookworm AS build
# The compiled check of the contract wants a C compiler here, and none where it runs.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY requirements/image.txt requirements/build.txt requirements/
RUN python -m venv /opt/tokenbus \
    && /opt/tokenbus/bin/python -m pip install --require-hashes --requirement requirements/image.txt \
    && python -m pip install --require-hashes --requirement requirements/build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY proto/tokenbus proto/tokenbus
COPY contracts/vectors/v1 contracts/vectors/v1
COPY contracts/tokenbus_contracts contracts/tokenbus_contracts
COPY gpu_ops/tokenbus_gpu_ops gpu_ops/tokenbus_gpu_ops
COPY services/tokenbus services/tokenbus
COPY services/tokenbus_fastdeploy.pth services/
RUN python -m hatchling build -t wheel -d dist \
    && /opt/tokenbus/bin/python -m pip install --no-deps --no-index dist/*.whl

FROM python:3.12.8-slim-bookworm
COPY --from=build /opt/tokenbus /opt/tokenbus
# A user that owns nothing but its own folder and those that the volumes of keys cover.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin tokenbus \
    && install --directory --owner tokenbus --group tokenbus /var/lib/tokenbus \
    && install --directory --owner tokenbus --group tokenbus --mode 0700 /keys/processor /keys/worker /keys/gateway
USER tokenbus
WORKDIR /var/lib/tokenbus
ENV PATH=/opt/tokenbus/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENBUS_LOG_FORMAT=json \
    TOKENBUS_PROCESSOR_METRICS_ADDRESS=0.0.0.0:9470 \
    TOKENBUS_WORKER_METRICS_ADDRESS=0.0.0.0:9470 \
    TOKENBUS_GATEWAY_ADDRESS=0.0.0.0:8000 \
    TOKENBUS_GATEWAY_METRICS_ADDRESS=0.0.0.0:9470
EXPOSE 5570 5571 8000 9470
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9470/healthz', timeout=2)"]
ENTRYPOINT ["tokenbus"]
CMD ["--help"]
