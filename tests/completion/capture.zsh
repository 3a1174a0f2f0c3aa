# SPDX-License-Identifier: Apache-2.0
# Print the completions that zsh offers at the end of the line $1, one on each line. $2 is the directory of _resctrlctl.
# Completion requires an interactive zsh, so this starts one on a pseudo-terminal, and presses the tab key.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; fpath=(${(q)2} \$fpath); autoload -U compinit; compinit -u -D; source ${(q)0:h}/offered.zsh; \
print READY-\$((1 + 1))"
while zpty -r shell line; do [[ $line == *READY-2* ]] && break; done
zpty -n -w shell "$1"$'\t'
while zpty -r shell line; do
  line=${line%$'\r\n'}
  [[ $line == *END-OF-OFFERS* ]] && break
  [[ $line == *OFFER:* ]] && print -r -- "${line##*OFFER:}"
done
zpty -d shell
