"""Read the metrics that a test fetched, as Prometheus does."""

from prometheus_client.parser import text_string_to_metric_families


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """The samples of an exposition: by name and the values of labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
