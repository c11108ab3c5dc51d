"""The certificate as Markdown: the verdict first, then each place, then the steps."""

from portable_fsdp.config.schema import Config
from portable_fsdp.parity.record import Certificate, Deviation, bounds


def markdown(certificate: Certificate) -> str:
    config, records, deviations = (
        Config.model_validate_json(certificate.config),
        certificate.records,
        certificate.deviations,
    )
    limit, steps = bounds(config), len(records[0].losses)
    loss_bound = limit.loss if steps <= 20 else limit.loss_after_20
    names = [str(record.place) for record in records]
    lines = [
        f"# Parity: {certificate.verdict}",
        "",
        f"{steps} steps, seed {config.run.seed}, {config.precision.compute}. Relative bounds: {loss_bound:g} "
        f"for losses, {limit.norm:g} for gradient norms.",
        "",
        "| place | device | versions |",
        "|---|---|---|",
        *(
            f"| {name} | {record.device_name} | {', '.join(map(' '.join, record.versions.items()))} |"
            for name, record in zip(names, records, strict=True)
        ),
        *(line for item in deviations for line in ("", f"## {item.place} beside {names[0]}", "", *_findings(item))),
        "",
        f"| step | {' | '.join(f'loss, {name} | gradient norm, {name}' for name in names)} | loss differs by |",
        "|---" * (2 + 2 * len(names)) + "|",
    ]
    for at in range(steps):
        cells = [f"{record.losses[at]:.7f} | {record.grad_norms[at]:.6f}" for record in records]
        worst = max((item.losses[at] for item in deviations), default=0.0)
        lines.append(f"| {at + 1} | {' | '.join(cells)} | {worst:.1e} |")
    return "\n".join(lines) + "\n"


def _findings(item: Deviation) -> list[str]:
    loss, norm = (
        f"{max(values):.1e} (step {values.index(max(values)) + 1})" for values in (item.losses, item.grad_norms)
    )
    lines = [f"- largest relative difference: {loss} of a loss, {norm} of a gradient norm"]
    lines.append(f"- first step beyond a bound: {item.first_step or 'none'}")
    if culprit := item.culprit:
        lines += [
            f"- **{culprit.what}** (step {culprit.step}, {culprit.kind}: {culprit.relative:.1e}, at most "
            f"{culprit.before:.1e} before it)",
            f"- its update in that step differs most: {culprit.parameter}",
        ]
    return [*lines, f"- {item.remark}"] if item.remark else lines
