"""The commands of `megavlm`. They import the other packages of megavlm, which import none of the commands."""
