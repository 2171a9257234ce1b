# What bash reads before a launch script (shell.py). Words in capitals that are set nowhere here are replaced.
enable -n kill
exec {BASH_XTRACEFD}>/dev/null
__whet_sleeps=0
__whet_note() {
    local IFS=$' \t\n' name piped=0 at=1
    while [[ ${BASH_SOURCE[at]-} == PRELUDE ]]; do (( at += 1 )); done
    [[ -p /dev/fd/1 ]] && piped=1
    {
        printf '%s\0' "$1" "${BASH_LINENO[-2]}" "${BASH_LINENO[at - 1]}" "${BASH_SOURCE[at]-}"
        printf '%s\0' "$PWD" "$piped" "$(($# - 1))" "${@:2}"
        for name in $(compgen -e); do
            case $name in SECRETS) ;; *) printf '%s=%s\0' "$name" "${!name-}" ;; esac
        done
    } > NOTES/"$EPOCHREALTIME.$BASHPID.$RANDOM"
    return "$piped"
}
command_not_found_handle() {
    case "$*" in npu-smi*|rocm-smi*|*torch_npu*) __whet_note probe "$@" || :; return 1 ;; esac
    __whet_note start "$@" || printf '%s' OUTPUT
    __whet_succeeds
}
__whet_succeeds() {
    local at=1
    while [[ ${BASH_SOURCE[at]-} == PRELUDE ]]; do (( at += 1 )); done
    case ${BASH_LINENO[at - 1]} in FAILS) return 1 ;; esac
}
__whet_other() {
    local first=
    [[ -f $1 && -r $1 ]] && { IFS= read -r first < "$1" || :; } 2> /dev/null
    if [[ $1 == */@(ba|da|z|)sh || $first == '#!'*sh* ]]; then
        [[ $first == '#!'*sh* ]] || shift
        bash "$@"
    else
        command_not_found_handle "$@"
    fi
}
ulimit() { :; }
sh() { bash "$@"; }
dash() { bash "$@"; }
zsh() { bash "$@"; }
sleep() { if (( ++__whet_sleeps > SLEEPS )); then exit 0; fi; }
cd() { builtin cd "$@" 2> /dev/null || __whet_note cd "$@" || :; }
command() {
    case ${1-} in
        -v|-V) builtin command "$@" || case ${2-} in npu-smi|rocm-smi) return 1 ;; *) echo "${2-}" ;; esac ;;
        *) builtin command "$@" ;;
    esac
}
