# SPDX-License-Identifier: Apache-2.0
# In the interactive zsh of capture.zsh: print each completion that is offered.
bindkey '^I' complete-word
zstyle ':completion:*' insert-tab false
_end_of_offers() { print -r -- END-OF-OFFERS; }
comppostfuncs=(_end_of_offers)
compadd() {
  local -a hits
  # With -O, -A or -D, compadd fills arrays and offers nothing.
  if [[ " ${@[1,(i)(-|--)]} " == *" -"[OAD]" "* ]]; then builtin compadd "$@"; return; fi
  builtin compadd -O hits "$@"
  (( $#hits )) && print -rl -- OFFER:${^hits}
  builtin compadd "$@"
}
