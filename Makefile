# Everything that this repository does for a person at a keyboard. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

.PHONY: help setup image up down demo test lint test-unit test-gateway test-molecule test-scenarios test-end-to-end test-vm test-driver lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what the rest needs: system packages, .venv, collections
	@scripts/setup

image: setup ## Build the image of a lab host
	@lab/build_image

up: image ## Boot the lab hosts gpu-a and gpu-b
	ansible-playbook -i inventory/lab lab/up.yml

demo: up ## Take two bare lab hosts to a served, verified endpoint, and ask it something
	ansible-playbook -i inventory/lab playbooks/deploy_minimax.yml
	@ansible-playbook -i inventory/lab lab/show.yml

down: setup ## Remove the lab hosts
	ansible-playbook -i inventory/lab lab/down.yml

test: lint test-unit test-gateway test-molecule test-end-to-end ## Run every check

lint: setup ## Check style, types, YAML, playbooks and shell
	ruff check
	ruff format --check
	mypy
	yamllint --strict .
	ansible-lint
	grep -rlIE '^#!/.*[/ ](ba)?sh$$' .ci lab molecule roles scripts | xargs shellcheck

test-unit: setup ## Run the unit tests
	pytest

test-gateway: setup ## Test the gateway: a real HAProxy over stand-in engines
	pytest tests/gateway

test-molecule: image ## Deploy to bare lab hosts: check, converge, idempotence, verify
	molecule test --scenario-name default

test-scenarios: image ## Run the scenarios of each role in lab hosts (half an hour)
	molecule test --all --exclude default --exclude numa_vm --exclude driver_vm

test-vm: ## Prove the pinning on a real kernel, in a virtual machine (minutes: its CPUs are emulated)
	@scripts/setup vm
	molecule test --scenario-name numa_vm

test-driver: ## Build NVIDIA's modules for real kernels, and install them in a virtual machine (some minutes)
	@scripts/setup vm
	@lab/build_nvidia_modules
	pytest tests/kernel_modules
	molecule test --scenario-name driver_vm

test-end-to-end: image ## Deploy as the README says, and send real requests
	pytest -s tests/end_to_end # -s: the plays print as they run

lock: setup ## Compile the locks anew; VLLM=0.33.0 makes those of another vLLM, DATE=2027-01-31 moves versions
	scripts/lock

clean: ## Leave the machine as it was before setup
	@scripts/clean
