# SPDX-License-Identifier: Apache-2.0
# bash completion of resctrlctl(1). It requires only bash. If bash-completion is loaded, it completes the command after
# "run --".

# Prints the keys of the workloads; nothing if resctrlctl fails. $1: the value of --socket on the line, if any; $2: that
# of --host, which is not asked, because ssh may ask for a password. $3: --all, or nothing for those that have not ended.
__resctrlctl_keys() {
    [[ -z $2 ]] || return
    resctrlctl ${1:+--socket "$1"} list ${3:+"$3"} --quiet 2>/dev/null
}

# Prints the units that systemd has loaded.
__resctrlctl_units() {
    local unit
    systemctl list-units --all --full --plain --no-legend --type=service,scope,slice 2>/dev/null |
        while read -r unit _; do echo "$unit"; done
}

# Prints the globs that "units disable" accepts, or the services that "units inexact" does, quoted for the shell. $1: the
# name of the files that set them.
__resctrlctl_set_in() {
    local name path
    resctrlctl units status --no-legend --full 2>/dev/null |
        while read -r name path; do [[ $path == */"$1" ]] && printf '%q\n' "$name"; done
}

# Prints the classes: the directories that have a schemata file.
__resctrlctl_classes() {
    local schemata
    echo /
    for schemata in /sys/fs/resctrl/*/schemata; do
        [[ -e $schemata ]] || continue
        schemata=${schemata%/schemata}
        echo "${schemata##*/}"
    done
}

# Sets COMPREPLY to the lines of $1 that begin with $2, the current word. bash splits words at "@", ":" and "=", which
# keys can contain, and replaces only the part after the last of them.
__resctrlctl_words() {
    local line before=${2%"${COMP_WORDS[COMP_CWORD]}"}
    [[ $2 == *[@:=] ]] && before=$2
    COMPREPLY=()
    while IFS= read -r line; do
        [[ -n $line && $line == "$2"* ]] && COMPREPLY+=("${line#"$before"}")
    done <<<"$1"
}

# Completes the command that begins at index $1 of COMP_WORDS.
__resctrlctl_command() {
    if declare -F _comp_command_offset >/dev/null; then
        _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    elif ((COMP_CWORD == $1)); then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}

_resctrlctl() {
    local common='--help --json --json=short --json=pretty --json=off --no-legend --quiet --full --socket --host'
    local -A options=(
        [list]='--all --pods --units --columns --sort --filter --rate --watch --root'
        [top]='--batch --iterations --delay --by --sort --reverse --filter'
        [watch]='--change --filter'
        [record]='--output --delay --count --parquet --filter'
        [plot]='--html'
        [show]='--raw --why --property --value --root'
        [status]=''
        [doctor]=''
        [classes]='--root'
        [machine]='--domains --rate --watch'
        [sums]='--by'
        [create]='--class --claim --attribute --no-pending --priority'
        [assign]='--pid --cgroup --tree --class --allow-class-change --take-over --member --claim --attribute --no-pending --priority'
        [release]='--claim --reason'
        [move]=''
        [hooks]='--hooks-dir'
        [units]=''
        [profiles]='--profiles-dir --root'
        [report]='--since --until --by --csv'
        [run]='--key --pid --cgroup --unit --class --take-over --best-effort --output --append --repeat --interval-print --events --field-separator'
    )
    local socket='' host='' profiles_dir=''
    local verbs='list top watch record plot show status doctor classes machine sums create assign release move hooks units profiles report run'
    local typed=${COMP_LINE:0:COMP_POINT} verb='' action='' count=0 index word
    local -a words
    read -ra words <<<"$typed"
    [[ $typed == *[[:space:]] ]] && words+=('')
    local last=$((${#words[@]} - 1))
    local current=${words[last]} previous=${words[last - 1]}
    COMPREPLY=()

    for ((index = 1; index < last; index++)); do
        word=${words[index]}
        if [[ $word == -- && $verb == run ]]; then
            for ((index = 1; index < COMP_CWORD; index++)); do
                [[ ${COMP_WORDS[index]} == -- ]] && __resctrlctl_command $((index + 1)) && return
            done
            return
        fi
        case $word in
            --socket=*) socket=${word#*=} ;;
            --host=*) host=${word#*=} ;;
            -H?*) host=${word#-H} ;;
            --host | -H)
                ((index++))
                host=${words[index]}
                ;;
            --profiles-dir=*) profiles_dir=${word#*=} ;;
            --profiles-dir)
                ((index++))
                profiles_dir=${words[index]}
                ;;
            # The value of these options is the next word.
            --socket)
                ((index++))
                socket=${words[index]}
                ;;
            --root | --class | --claim | --priority | --attribute | --member | --reason | --key | -o | --output | --html | --pid | --cgroup | --unit | --hooks-dir | --columns | --sort | --change | --filter | --since | --until | --by | -n | --iterations | --count | -d | --delay | -r | --repeat | -I | --interval-print | -e | --events | -x | --field-separator | -p | --property)
                ((index++))
                ;;
            -*) ;;
            *)
                if [[ $verb == run ]]; then
                    for ((index = 1; index < COMP_CWORD; index++)); do
                        [[ ${COMP_WORDS[index]} == "$word" ]] && __resctrlctl_command "$index" && return
                    done
                    return
                fi
                if [[ -z $verb ]]; then
                    verb=$word
                else
                    ((count++)) || action=$word
                fi
                ;;
        esac
    done

    case $previous in
        --socket | -o | --output | --html)
            mapfile -t COMPREPLY < <(compgen -f -- "$current")
            return
            ;;
        --root | --cgroup | --hooks-dir | --profiles-dir)
            mapfile -t COMPREPLY < <(compgen -d -- "$current")
            return
            ;;
        --host | -H)
            __resctrlctl_words "$(compgen -A hostname)" "$current"
            return
            ;;
        --class)
            __resctrlctl_words "follow"$'\n'"$(__resctrlctl_classes)" "$current"
            return
            ;;
        --pid | -p)
            [[ $previous == -p && $verb != run ]] && return
            __resctrlctl_words "$(cd /proc && compgen -G '[1-9]*')" "$current"
            return
            ;;
        --by)
            if [[ $verb == report ]]; then
                __resctrlctl_words $'key\nnamespace\npod\nunit\nuser\nclass' "$current"
                return
            fi
            if [[ $verb == sums ]]; then
                __resctrlctl_words $'namespace\nslice\nuser\nprofile' "$current"
                return
            fi
            __resctrlctl_words "$(printf '%s\n' workload pod namespace unit class domain)" "$current"
            return
            ;;
        --sort | --columns)
            if [[ $verb == top ]]; then
                __resctrlctl_words "$(printf '%s\n' name workloads power bandwidth llc energy age quality)" "$current"
                return
            fi
            # Complete the last name of a list.
            local names='workload key state class age since cpu llc traffic bandwidth energy power quality members namespace pod container command unit owner companion reason'
            local before=''
            [[ $current == *,* ]] && before=${current%,*},
            __resctrlctl_words "$(printf "$before%s\n" $names)" "$current"
            return
            ;;
        --change)
            __resctrlctl_words $'present\nadded\npending\nchanged\nended\nlost\nremoved' "$current"
            return
            ;;
        --filter)
            case $current in
                state=*) __resctrlctl_words "$(printf 'state=%s\n' pending active idle ending completed lost failed)" "$current" ;;
                quality=*) __resctrlctl_words "$(printf 'quality=%s\n' exact late estimated unknown)" "$current" ;;
                class=*) __resctrlctl_words "$(__resctrlctl_classes | sed 's/^/class=/')" "$current" ;;
                *) __resctrlctl_words "$(printf '%s=\n' state class owner quality namespace pod container unit key)" "$current" ;;
            esac
            return
            ;;
        --events | -e)
            local names='llc_occupancy mbm_total_bytes mbm_local_bytes core_energy activity stalls_llc_hit stalls_llc_miss c1_res c6_res unhalted_core_cycles unhalted_ref_cycles uops_retired'
            local before=''
            [[ $current == *,* ]] && before=${current%,*},
            __resctrlctl_words "$(printf "$before%s\n" $names)" "$current"
            return
            ;;
        --since | --until)
            __resctrlctl_words $'today\nyesterday\nnow' "$current"
            return
            ;;
        --claim | --priority | --attribute | --member | --reason | --key | --unit | -n | --iterations | --count | -d | --delay | -r | --repeat | -I | --interval-print | -x | --field-separator | -p | --property)
            return
            ;;
    esac

    if [[ -z $verb ]]; then
        __resctrlctl_words "${verbs// /$'\n'}"$'\n'"${common// /$'\n'}"$'\n'--version "$current"
    elif [[ $current == -* ]]; then
        local all="$common ${options[$verb]-}"
        [[ $verb == run ]] && all+=' --'
        __resctrlctl_words "${all// /$'\n'}" "$current"
    else
        case $verb:$count in
            watch:* | record:* | show:* | create:0 | assign:0)
                __resctrlctl_words "$(__resctrlctl_keys "$socket" "$host" --all)" "$current"
                ;;
            release:0 | move:0)
                __resctrlctl_words "$(__resctrlctl_keys "$socket" "$host")" "$current"
                ;;
            status:*)
                __resctrlctl_words "$(__resctrlctl_units)" "$current"
                ;;
            plot:0)
                mapfile -t COMPREPLY < <(compgen -f -- "$current")
                ;;
            run:0)
                mapfile -t COMPREPLY < <(compgen -c -- "$current")
                ;;
            hooks:0)
                __resctrlctl_words $'enable\ndisable\nstatus' "$current"
                ;;
            units:0)
                __resctrlctl_words $'enable\ndisable\nexact\ninexact\nstatus' "$current"
                ;;
            units:*)
                # Another host is not asked, because ssh may ask for a password.
                [[ -n $host ]] || case $action in
                    enable | exact) __resctrlctl_words "$(__resctrlctl_units)" "$current" ;;
                    disable) __resctrlctl_words "$(__resctrlctl_set_in units.yaml)" "$current" ;;
                    inexact) __resctrlctl_words "$(__resctrlctl_set_in zz-resctrlmon-exact.conf)" "$current" ;;
                esac
                ;;
            profiles:0)
                __resctrlctl_words $'list\nshow\ncheck\nexplain' "$current"
                ;;
            profiles:1)
                case $action in
                    show) __resctrlctl_words "$(resctrlctl profiles ${profiles_dir:+--profiles-dir "$profiles_dir"} list --quiet 2>/dev/null)" "$current" ;;
                    check) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
                    explain) __resctrlctl_words "$(__resctrlctl_keys "$socket" "$host" --all)" "$current" ;;
                esac
                ;;
            move:1)
                __resctrlctl_words "$(__resctrlctl_classes)" "$current"
                ;;
        esac
    fi
}

complete -F _resctrlctl resctrlctl
