#!/usr/bin/env bash
# Runs coding agents once against the scripted server, in the folder FROM, for agents.py.
#
#     tests/logs/make/agents.sh FROM
#
# codex, claude, mini and aider must be in PATH. README.md has the versions.
set -euo pipefail
MAKE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/home/.codex" "$1/repo"
cd "$1/repo"
git init --quiet .
echo hi > notes.txt
python3 "$MAKE/server.py" > ../url.txt &
SERVER=$!
trap 'kill $SERVER' EXIT
sleep 1
URL=$(cat ../url.txt)
HOME=$(cd ../home && pwd)
export HOME KEY=x
cat > "$HOME/.codex/config.toml" <<TOML
model = "sample-model"
model_provider = "sample"
[model_providers.sample]
name = "Sample"
base_url = "$URL/v1"
env_key = "KEY"
wire_api = "responses"
TOML
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Where is order 17?" < /dev/null
ANTHROPIC_BASE_URL=$URL ANTHROPIC_AUTH_TOKEN=x IS_SANDBOX=1 DISABLE_TELEMETRY=1 \
    claude -p --dangerously-skip-permissions "Where is order 17?" < /dev/null
MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors OPENAI_API_KEY=x OPENAI_API_BASE=$URL/v1 \
    mini -y --exit-immediately -m openai/sample-model -t "SUBMIT: list the files of order 17" -o ../mini.traj.json < /dev/null
aider --model openai/sample-model --openai-api-base "$URL/v1" --openai-api-key x --no-check-update \
    --analytics-disable --no-show-model-warnings --yes-always --no-auto-commits \
    --llm-history-file .aider.llm.history --message "Explain order 17" < /dev/null
