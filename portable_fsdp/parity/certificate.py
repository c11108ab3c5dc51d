"""The certificate as Markdown."""

from portable_fsdp.config.schema import Config
from portable_fsdp.parity.record import Certificate, Deviation, loss_bound, norm_bound


def markdown(certificate: Certificate) -> str:
    """The verdict first, then each place, then the steps."""
    config, records = Config.model_validate(certificate.config, strict=False), certificate.records
    steps = len(records[0].losses)
    lines = [f"# Parity: {certificate.verdict}", "", f"{steps} steps of run.seed={config.run.seed}, {_dtypes(config)}."]
    lines += [f"Bounds: {loss_bound(config, steps):g} for losses, {norm_bound(config):g} for gradient norms."]
    lines += ["", "| place | device | versions |", "|---|---|---|"]
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        lines.append(f"| {record.place} | {record.device_name} | {versions} |")
    for item in certificate.deviations:
        lines += ["", f"## {item.place} beside {records[0].place}", "", *_summary(item)]
    names = [str(record.place) for record in records]
    lines += [
        "",
        "## Steps",
        "",
        f"| step | {' | '.join(f'loss {n} | norm {n}' for n in names)} | largest difference |",
    ]
    lines.append("|---" * (2 + 2 * len(names)) + "|")
    for at in range(steps):
        cells = [f"{record.losses[at]:.7f} | {record.grad_norms[at]:.6f}" for record in records]
        worst = max((item.losses[at] for item in certificate.deviations), default=0.0)
        lines.append(f"| {at + 1} | {' | '.join(cells)} | {worst:.1e} |")
    return "\n".join(lines) + "\n"


def _summary(item: Deviation) -> list[str]:
    worst = [f"{max(values):.1e} (step {values.index(max(values)) + 1})" for values in (item.losses, item.grad_norms)]
    lines = [f"- largest relative difference of losses: {worst[0]}; of gradient norms: {worst[1]}"]
    if item.first_step is not None:
        lines.append(f"- first step beyond a bound: {item.first_step}")
    if culprit := item.culprit:
        lines += [
            f"- **{culprit.what}**",
            f"- in step {culprit.step}, {culprit.kind}: {culprit.relative:.1e}, at most {culprit.before:.1e} before it",
            f"- parameter whose update in that step differs most: {culprit.parameter}",
        ]
    return [*lines, f"- {item.remark}"] if item.remark else lines


def _dtypes(config: Config) -> str:
    precision = config.precision
    return f"{precision.compute} over {precision.master} weights, matmul {precision.matmul}"
