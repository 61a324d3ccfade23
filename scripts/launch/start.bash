# Sourced by the launch scripts: parses the flags and replaces this process with the launcher.

# Prints every ${NAME:-default} of the file, with the comment of its first use.
variables() {
    awk '/^#/ { next } match($0, /\$\{[A-Z_0-9]+:-[^}]*\}/) {
        reference = substr($0, RSTART + 2, RLENGTH - 3)
        split(reference, part, ":-")
        name = part[1]
        sub(/^[A-Z_0-9]+:-/, "", reference)
        if (name in seen) next
        seen[name] = 1
        comment = ""
        if (match($0, / # /)) comment = substr($0, RSTART + 3)
        printf "  %s=%s%s\n", name, reference, (comment == "" ? "" : "\n      " comment)
    }' "$1"
}

usage() {
    local name=$1 deployment=$2
    cat <<END
usage: $name [--engine NAME] [--deployment FILE.yaml] [flags of dynamo-trtllm launch]

$about

  --engine NAME          engine of all workers instead of the file's: trtllm, torch, vllm or mock; drops settings of the
                         file's engine
  --deployment FILE      deployment file (default: ${deployment#"$root"/})
  --demo, --once         send one request when all processes are ready; stop after it

Uses \$PYTHON, .venv/bin/python of this repository, or python3. Environment variables:

END
    variables "$deployment"
    cat <<END

Ctrl-C or SIGTERM drains the workers and stops everything; a second one does not wait. On a machine without GPUs:
  MODEL_PATH=tiny-gpt-oss $name --engine mock
END
}

# launch DEPLOYMENT ARGUMENTS...
launch() {
    local name=$0 deployment=$root/$1 words=() python=${PYTHON:-} options=()
    shift
    while (($#)); do
        case $1 in
            -h | --help) usage "$name" "$deployment"; exit 0 ;;
            --deployment)
                (($# > 1)) || { echo "$name: $1 needs a file" >&2; exit 2; }
                deployment=$2
                shift 2
                ;;
            --deployment=*) deployment=${1#*=}; shift ;;
            *) words+=("$1"); shift ;;
        esac
    done
    if [[ -z $python ]]; then
        python=python3
        [[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
    fi
    # Without -P, a file of the working folder could replace a module of the libraries. In this
    # checkout, the working folder may be where the package is found.
    [[ $PWD -ef $root ]] || options=(-P)
    exec "$python" "${options[@]}" -m dynamo_trtllm.launch "${words[@]}" "$deployment"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
