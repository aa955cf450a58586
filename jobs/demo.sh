#!/usr/bin/env bash
# Train a small language model on this machine, the way one would on a cluster: data, a Ray head, a submitted job.
#
#   make demo
#   bash jobs/demo.sh [COMMAND …]     submits another command instead; needs `make setup`
#
# Ends with the job's exit status, and leaves no process behind, on Ctrl-C neither.
set -euo pipefail
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"              # so that `python` in the job is ours too
export PYTHONUNBUFFERED=1 RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # no node takes over what runs here: end at once
unset RAY_ADDRESS RAY_API_SERVER_ADDRESS

free_port() { # not 8265, the usual one of a dashboard: two that start at a time would both find it free
  python -c "import socket; print(socket.create_server(('127.0.0.1', 0)).getsockname()[1])"
}

end() {
  trap '' INT TERM
  [ -z "${job:-}" ] || ray job stop --address "$url" "$job" >/dev/null 2>&1 || true
  for pid in ${submit:-} ${head:-}; do
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$tmp"
}

lost() { # Ray has ended by itself; of its log the last lines in which an exception or a process is named
  echo "error[NET002]: Ray $1. Fix: try again when this machine has less to do. Its last words:" >&2
  grep -E '^[A-Za-z.]+(Error|Exception|Exit)|\[exit code' "$tmp/head.log" | tail -n 3 >&2 || tail -n 3 "$tmp/head.log" >&2
  exit 75
}

tmp=$(mktemp -d /tmp/hypha.XXXXXX)              # short: Ray puts sockets there, whose paths have a limit
export RAY_TMPDIR=$tmp
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ $# = 0 ]; then
  data=$PWD/.demo/data/stdlib
  [ -f "$data/manifest.json" ] || python jobs/prepare.py --source stdlib --out "$data" --tokenizer byte --seq-len 128
  set -- python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path "$data"
fi

ray get-auth-token --generate >/dev/null 2>&1    # makes one if there is none; never shown

port=$(free_port)
url=http://127.0.0.1:$port
echo "starting Ray"
ray start --head --block --disable-usage-stats --num-cpus=2 --object-store-memory=500000000 \
  --port=0 --dashboard-port="$port" --ray-client-server-port="$(free_port)" \
  --dashboard-agent-listen-port="$(free_port)" >"$tmp/head.log" 2>&1 &
head=$!
until python -c "import urllib.request as u; u.urlopen('$url/api/gcs_healthz', timeout=2)" 2>/dev/null; do
  kill -0 "$head" 2>/dev/null || lost "did not start on this machine"
  sleep 0.5
done
echo "dashboard: $url while the job runs (token: ray get-auth-token)"

job=demo-$$
mkdir "$tmp/code" && cp -r hypha_ray jobs "$tmp/code" # a copy: a file that changes while it is sent would spoil the job
ray job submit --address "$url" --submission-id "$job" --log-style pretty --log-color false \
  --working-dir "$tmp/code" -- "$@" > >(tee "$tmp/job.log") 2>"$tmp/submit.err" &
submit=$!
wait "$submit" || true                          # in the background, so that a signal ends the wait at once
status=$(python -c "from ray.job_submission import JobSubmissionClient
info = JobSubmissionClient('$url').get_job_info('$job')
print(0 if info.status == 'SUCCEEDED' else info.driver_exit_code or 1)" 2>/dev/null) || {
  kill -0 "$head" 2>/dev/null || lost "ended before the job did"
  cat "$tmp/submit.err" >&2
  exit 1
}
job=
if [ "$status" = 0 ] && [ -n "${data:-}" ]; then
  run=$(sed -n 's/^run: //p' "$tmp/job.log" | tail -n 1)    # told at the start and at the end
  echo "the trained model, loaded again: $(python jobs/evaluate.py --model "$run/model" --dataset "$data" | tail -n 1)"
  echo "report: $run/report.html"
  echo "plots: $run/plots"
  echo "run: $run"
fi
exit "$status"
