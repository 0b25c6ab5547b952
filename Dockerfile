# Two images, on Debian's own Python, which is smaller than the images of Python by what these have besides:
#
#     docker build --target build --tag tvm_deconv:build .    # compiles: TVM, onnx, g++
#     docker build --tag tvm_deconv .                         # runs artifacts: NumPy and apache-tvm-ffi
#
# All that is installed from an index is pinned with hashes in requirements/.
FROM debian:13-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*

FROM base AS pip
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM pip AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM pip AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/compile.txt /tmp/
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/compile.txt
RUN --mount=from=wheel,source=/dist,target=/dist pip install --no-cache-dir --no-deps /dist/*.whl
USER 65534
WORKDIR /work
ENTRYPOINT ["tvm-deconv"]

FROM pip AS packages
COPY requirements/run.txt /tmp/
# What only tests and compilers of these packages need stays out: 13 MB.
RUN --mount=from=wheel,source=/dist,target=/dist \
    python3 -m venv --without-pip /opt/venv \
    && pip --python /opt/venv install --no-cache-dir --no-compile --require-hashes --requirement /tmp/run.txt \
    && pip --python /opt/venv install --no-cache-dir --no-compile --no-deps /dist/*.whl \
    && find /opt/venv -depth -type d \( -name tests -o -name include -o -name 3rdparty \) -exec rm -r {} +

FROM base AS run
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER 65534
WORKDIR /work
CMD ["python", "-c", "import tvm_deconv; help(tvm_deconv.load)"]
