"""A stand-in for the gateway: summaries and history, as `dispatch.monitoring.summary` publishes them, of moving loads."""

import json
import math
import random
import time
from typing import Any

import redis

from controlplane.dispatch.wire import HISTORY_KEY, HISTORY_LENGTH, SUMMARY_KEY

Row = dict[str, Any]


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


PACE = ("ttft_p95_ms", "itl_p95_ms", "output_tokens_per_s")


class Feed:
    """Deterministic for a seed and a time."""

    def __init__(self, rows: list[Row], seed: int = 7) -> None:
        self.rows = rows
        self.seed = seed
        self.sequence = 0
        self.started_at = 0.0
        self.created_at = time.time() - 600.0  # start of the loads' movement: a new feed is the same at any hour
        self.relays: list[Row] = []
        self.trouble: dict[str, Row] = {}  # values of a job or part by its name

    def load(self, number: int, ts: float) -> float:
        """Return a slowly moving value between 0 and 1, with its own phase for each instance."""
        ts -= self.created_at
        noise = random.Random(f"{self.seed}:{number}:{round(ts)}").uniform(-0.04, 0.04)
        slow = math.sin(ts / 240 + number * 1.7) * 0.22 + math.sin(ts / 60 + number) * 0.08
        return min(0.99, max(0.02, 0.48 + (number * 37 % 17) / 60 + slow + noise))

    def instance(self, number: int, row: Row, ts: float) -> Row:
        load = self.load(number, ts)
        alive = row["state"] in ("ready", "draining")
        answers = alive and row.get("reachable", True)
        kv = row.get("kv_ratio", round(load, 4)) if answers else None
        running, limit = row.get("running", round(load * 60)) if answers else 0, row.get("max_num_seqs", 128)
        return {
            **{name: row[name] for name in ("id", "name", "model", "region", "gpu_type", "state")},
            "reachable": row.get("reachable", row["state"] not in ("failed", "stopped", "provisioning")),
            "running": running,
            "waiting": row.get("waiting", 0),
            "max_num_seqs": limit,
            "kv_ratio": kv,
            "use_ratio": None if kv is None else round(max(running / limit, kv), 4),
            "output_tokens_per_s": round(load * 2400, 1) if answers else 0.0,
            "ttft_p95_ms": round(180 + load * 420, 1) if answers else None,
            "itl_p95_ms": round(16 + load * 24, 1) if answers else None,
            "preemptions_per_min": float(int(load > 0.85)) if answers else 0.0,
            "prefix_hit_ratio": round(0.2 + load * 0.3, 4) if answers else None,
            "cached_blocks": row.get("cached_blocks"),
            "cache_unknown": row.get("cache_unknown", ""),
            "heartbeat_at": ts - (0.4 if row.get("reachable", True) else 42),
            "state_since": ts - 3600 - number * 700,
        }

    def summary(self, ts: float) -> dict[str, Any]:
        self.sequence += 1
        self.started_at = self.started_at or ts - 7200
        instances = [self.instance(number, row, ts) for number, row in enumerate(self.rows)]
        endpoints = self.endpoints(instances)
        return {
            "seq": self.sequence,
            "ts": ts,
            "owner": "feed:1",
            "started_at": self.started_at,
            "fleet": self.tile(instances, endpoints, ts),
            "models": {
                model: self.tile(
                    [row for row in instances if row["model"] == model],
                    [row for row in endpoints if row["model"] == model],
                    ts,
                )
                for model in sorted({row["model"] for row in instances})
            },
            "endpoints": columns(endpoints),
            "instances": columns(instances),
            "lengths": self.lengths(ts),
            "system": self.system(ts),
            "relays": self.relays,
        }

    def system(self, ts: float) -> dict[str, Any]:
        """Report jobs and parts as the gateway does: all well, except those in `trouble`."""

        def job(name: str, kind: str, period_s: float, **values: Any) -> Row:
            done = {"last_success_at": ts - period_s / 2, "last_error": "", "last_error_at": None}
            counts = {"failures_in_a_row": 0, "failures_total": 0, "last_duration_s": period_s / 90, "quiet": False}
            row = {"name": name, "kind": kind, "state": "ok", "period_s": period_s, "due_at": ts + period_s / 2}
            return {**row, **done, **counts, **self.trouble.get(name, {}), **values}

        def part(name: str, detail: str, restarts: int | None = None) -> Row:
            row = {"name": name, "state": "ok", "detail": detail, "since": ts - 4000, "restarts": restarts}
            return {**row, "process_id": None if restarts is None else 4_000 + len(name), **self.trouble.get(name, {})}

        return {
            "jobs": [
                job("forecasts", "celery", 600.0),
                job("plans", "celery", 3600.0),
                job("advance-rollouts", "celery", 5.0),
                job("prune-ledger", "celery", 3600.0),
                job("flush-ledger", "gateway", 0.5),
                job("heartbeats", "gateway", 1.0),
            ],
            "parts": [
                part("web", "feed:1 owns the regions; 12 requests under way", 0),
                part("redis", "answers in 0.4 ms", 0),
                part("database", "the inventory is read in 6 ms; 0 ledger rows wait to be written"),
                part("celery", "worker@feed: control, simulation", 1),
                part("beat", "a periodic task ended 2 s ago", 0),
                part("instances", f"{len(self.rows)} of {len(self.rows)} ready"),
                part("lengths", "trees 2 answers", 0),
            ],
        }

    def lengths(self, ts: float) -> dict[str, Any]:
        """Report the gateway's length service: counts grow by a few answers a second."""
        answers = int((ts - self.started_at) * 9)
        shares = {"cache": 0.28, "model": 0.69, "prior": 0.03}
        wobble = random.Random(f"{self.seed}:{round(ts - self.created_at)}").uniform(0.9, 1.1)
        return {
            "answered": {source: int(answers * share) for source, share in shares.items()} | {"forced": 12},
            "p50_ms": round(0.21 * wobble, 3),
            "p99_ms": round(1.9 * wobble, 3),
            "late": answers // 600,
            "failed": 0,
            "cache_entries": 1_830,
            "version": "trees 2",
            "shadow": "trees 3",
            "models": [
                self.length_model("trees 2", answers, 0.21 * wobble, 1.9 * wobble, 0.999),
                self.length_model("preserve 4", answers // 3, 31.0 * wobble, 78.0 * wobble, 0.86),
            ],
            "restarts": 0,
        }

    @staticmethod
    def length_model(version: str, asked: int, p50_ms: float, p99_ms: float, share: float) -> dict[str, Any]:
        return {
            "version": version,
            "kind": version.split()[0],
            "own_process": not version.startswith("trees"),
            "restarts": 0,
            "asked": asked,
            "in_time": int(asked * share),
            "p50_ms": round(p50_ms, 3),
            "p99_ms": round(p99_ms, 3),
        }

    def endpoints(self, instances: list[Row]) -> list[Row]:
        rows = []
        for model, region in sorted({(row["model"], row["region"]) for row in instances}):
            members = [row for row in instances if (row["model"], row["region"]) == (model, region)]
            running = sum(row["running"] for row in members)
            known = [row["kv_ratio"] for row in members if row["kv_ratio"] is not None]
            rows.append(
                {
                    "model": model,
                    "region": region,
                    "running": running,
                    "waiting": max(0, running - 40 * len(members)),
                    "oldest_wait_s": 1.2 if running > 40 * len(members) else 0.0,
                    "estimated_wait_s": 0.8,
                    "requests_per_s": round(running * 0.045, 2),
                    "prompt_tokens_per_s": round(running * 52.0, 1),
                    "output_tokens_per_s": round(sum(row["output_tokens_per_s"] for row in members), 1),
                    "kv_ratio": round(sum(known) / len(known), 4) if known else None,
                    "instances_ready": sum(row["state"] == "ready" and row["reachable"] for row in members),
                    "instances": len(members),
                }
            )
        return rows

    def tile(self, instances: list[Row], endpoints: list[Row], ts: float) -> dict[str, Any]:
        ttft = [row["ttft_p95_ms"] for row in instances if row["ttft_p95_ms"] is not None]
        p95 = round(sum(ttft) / len(ttft), 1) if ttft else None
        wobble = random.Random(f"{self.seed}:{len(instances)}:{round((ts - self.created_at) / 5)}").uniform(1.15, 1.45)
        kv = [row["kv_ratio"] for row in instances if row["kv_ratio"] is not None]
        total = {name: sum(row[name] for row in endpoints) for name in ("requests_per_s", "prompt_tokens_per_s")}
        return {
            "requests_per_s": round(total["requests_per_s"], 2),
            "output_tokens_per_s": round(sum(row["output_tokens_per_s"] for row in endpoints), 1),
            "prompt_tokens_per_s": round(total["prompt_tokens_per_s"], 1),
            "failed_ratio": 0.0,
            **self.service_level(p95),
            "slo_ended": round(total["requests_per_s"] * 300) if p95 else 0,
            "ttft_p50_ms": round(p95 * 0.46, 1) if p95 else None,
            "ttft_p95_ms": p95,
            "ttft_all_p95_ms": p95,
            "ttft_p99_ms": round(p95 * wobble, 1) if p95 else None,
            "itl_p50_ms": 21.4 if p95 else None,
            "itl_p95_ms": round(p95 / 13, 1) if p95 else None,
            "e2e_p95_ms": 9_400.0 if p95 else None,
            "waiting": sum(row["waiting"] for row in endpoints),
            "running": sum(row["running"] for row in endpoints),
            "kv_max_ratio": max(kv, default=None),
            "instances_ready": sum(row["state"] == "ready" and row["reachable"] for row in instances),
            "instances": len(instances),
            "ttft_slo_ms": 500,
        }

    @staticmethod
    def service_level(p95_ms: float | None) -> Row:
        """Of the interactive class, the feed's only one."""
        if p95_ms is None:
            return {"slo_class": None, "slo_met_ratio": None, "slo_objective_ratio": None, "slo_burn": None}
        ratio = round(0.996 - max(0.0, (p95_ms - 430) / 2000), 4)
        burn = round((1 - ratio) / 0.05, 4)
        return {"slo_class": "interactive", "slo_met_ratio": ratio, "slo_objective_ratio": 0.95, "slo_burn": burn}

    def sample(self, ts: float) -> dict[str, Any]:
        """Reduce a summary to what the gateway keeps for the charts."""
        summary = self.summary(ts)
        instances = summary["instances"]
        return {
            "ts": ts,
            "fleet": summary["fleet"],
            "models": summary["models"],
            "kv": dict(zip(instances.get("name", []), instances.get("kv_ratio", []), strict=True)),
            "load": {
                name: [running, waiting]
                for name, running, waiting in zip(
                    instances.get("name", []), instances.get("running", []), instances.get("waiting", []), strict=True
                )
            },
            "pace": {
                name: pace
                for name, *pace in zip(
                    *(instances.get(column, []) for column in ("name", *PACE)),
                    strict=True,
                )
            },
        }

    def history(self, until: float, samples: int = HISTORY_LENGTH) -> list[dict[str, Any]]:
        return [self.sample(until - 5.0 * back) for back in reversed(range(samples))]


def publish(client: redis.Redis, feed: Feed) -> None:
    text = json.dumps(feed.summary(time.time()))
    client.set(SUMMARY_KEY, text, ex=15)


def fill_history(client: redis.Redis, feed: Feed, samples: int = HISTORY_LENGTH) -> None:
    client.delete(HISTORY_KEY)
    lines = [json.dumps(sample) for sample in feed.history(time.time(), samples)]
    if lines:
        client.rpush(HISTORY_KEY, *lines)
