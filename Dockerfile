# A node of a cluster, a driver or a trainer, by what is mounted and which command is given:
#
#   docker build -t hypha_ray .
#   docker run --rm -v "$PWD:/workspace" hypha_ray prepare --source stdlib --out data/stdlib
#   docker run --rm -v "$PWD:/workspace" --shm-size=4gb hypha_ray diloco @ tiny.toml --dataset.path data/stdlib
#   docker run --network=host --shm-size=16gb -v ~/.ray/auth_token:/root/.ray/auth_token:ro \
#       --entrypoint ray hypha_ray start --address HEAD:6379 --block

FROM python:3.11-slim

COPY constraints.txt pyproject.toml README.md LICENSE /build/
COPY hypha_ray /build/hypha_ray
COPY jobs /build/jobs
RUN pip install --no-cache-dir -c /build/constraints.txt /build && rm -r /build

ENV RAY_AUTH_MODE=token HYPHA_RAY_HOME=/workspace/runs
WORKDIR /workspace
ENTRYPOINT ["hypha-ray"]
CMD ["--help"]
