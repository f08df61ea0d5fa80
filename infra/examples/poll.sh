#!/bin/sh
# Submit a question, leave, and come back for the answer: poll.sh [GATEWAY_URL] [QUESTION]
# Needs curl. A retry with the same Idempotency-Key would not run twice.
set -eu
url=${1:-http://127.0.0.1:8080}
question=${2:-Name the capital of France.}
key=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')

place=$(curl -sf --retry 3 --retry-connrefused -o /dev/null -w '%header{location}' "$url/v1/chat/completions" \
  -H 'Content-Type: application/json' -H 'Prefer: respond-async' -H "Idempotency-Key: $key" \
  -d "{\"model\": \"smollm2-135m-instruct\", \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}")

answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
while [ "$(curl -s -o "$answer" -w '%{http_code}' "$url$place/answer?wait_s=20")" = 202 ]; do :; done
cat "$answer"
echo
