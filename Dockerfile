# Two images:
#
#     docker build --target build --tag tvm_deconv:build .    # compiles: TVM, onnx, g++
#     docker build --tag tvm_deconv .                         # runs artifacts: NumPy and apache-tvm-ffi
#
# All that is installed from an index is pinned with hashes in requirements/.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/compile.txt /tmp/
RUN pip install --no-cache-dir --require-hashes --requirement /tmp/compile.txt
RUN --mount=from=wheel,source=/dist,target=/dist pip install --no-cache-dir --no-deps /dist/*.whl
USER 65534
WORKDIR /work
ENTRYPOINT ["tvm-deconv"]

FROM python:${PYTHON}-slim-bookworm AS packages
COPY requirements/run.txt /tmp/
# What only tests and compilers of these packages need stays out: 13 MB.
RUN --mount=from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-compile --target /packages --require-hashes --requirement /tmp/run.txt \
    && pip install --no-cache-dir --no-compile --target /packages --no-deps /dist/*.whl \
    && find /packages -depth -type d \( -name tests -o -name include -o -name 3rdparty \) -exec rm -r {} +

FROM python:${PYTHON}-slim-bookworm AS run
COPY --from=packages /packages /opt/packages
ENV PYTHONPATH=/opt/packages
USER 65534
WORKDIR /work
CMD ["python", "-c", "import tvm_deconv; help(tvm_deconv.load)"]
