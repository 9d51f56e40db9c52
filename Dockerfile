# What `docker run IMAGE` needs: CUDA 12.8, the wheels of uv.lock, every kernel prebuilt. See docs/container.md.
ARG BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04@sha256:520292dbb4f755fd360766059e62956e9379485d9e073bbd2f6e3c20c270ed66

# --- the host's tools and the wheels, by their hashes ---
FROM ${BASE} AS wheels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/flashladder
COPY pyproject.toml uv.lock container/uv.txt ./
ARG EXTRAS="--extra gpu"
ARG UV_SYSTEM_CERTS
# hadolint ignore=SC2086
RUN python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r uv.txt \
    && UV_PROJECT_ENVIRONMENT=/opt/venv /opt/uv/bin/uv sync --locked --no-dev ${EXTRAS} \
    --no-install-project --no-cache --no-python-downloads --compile-bytecode \
    && rm -rf /opt/uv uv.txt
# Any user may be given: HOME is writable by all, and torch finds a user's name where no password file has one.
RUN mkdir -p /home/flashladder /results && chmod 1777 /home/flashladder /results
ENV HOME=/home/flashladder \
    USER=flashladder \
    PATH=/opt/venv/bin:${PATH} \
    PYTHONPATH=/opt/flashladder/src
COPY container/flashladder /usr/local/bin/flashladder

# --- the kernels: made anew when a source changes, not when a page does ---
FROM wheels AS kernels
COPY kernel kernel
COPY experiments/*.toml experiments/
COPY src src
ARG ARCHS="sm_80 sm_86 sm_89 sm_90a compute_80"
ARG PREBUILD="--variants"
# hadolint ignore=SC2086
RUN FLASHLADDER_ARCHS="${ARCHS}" flashladder build ${PREBUILD} \
    && find build -name '*.o' -delete \
    && chmod -R a+rwX build

# --- the image ---
FROM wheels
COPY . .
COPY --from=kernels /opt/flashladder/build build
RUN find . ! -perm -a+w -exec chmod a+rwX {} +
ARG ARCHS="sm_80 sm_86 sm_89 sm_90a compute_80"
ARG COMMIT=unknown
ENV FLASHLADDER_ARCHS=${ARCHS} \
    FLASHLADDER_COMMIT=${COMMIT}
USER 1000:1000
ENTRYPOINT ["flashladder"]
CMD ["ablation", "--out", "/results"]
