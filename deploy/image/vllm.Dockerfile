# An image of vLLM with Refrain's Python package inside, for a worker with `attached = true` beside it.
#
#     docker build -f deploy/image/vllm.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0 -t refrain-vllm:0.1.0 .
#
# The package is compiled in that image, so it fits the image's Python and C library.
ARG VLLM_IMAGE
ARG RUST_IMAGE=rust:1.90
FROM ${RUST_IMAGE} AS rust

FROM ${VLLM_IMAGE} AS wheel
USER 0
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
ENV RUSTUP_HOME=/usr/local/rustup CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:$PATH
ARG PROFILE=dist
WORKDIR /src
COPY . .
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir maturin==1.16.0 \
    && /build/bin/maturin build --locked --profile "$PROFILE" --out /wheels -m shared/engine-plugin-python/Cargo.toml

FROM ${VLLM_IMAGE}
COPY --from=wheel /wheels /tmp/wheels
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/wheels/*.whl
