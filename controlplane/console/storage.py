"""Static files whose names carry their content's hash, so that browsers keep them for ever; also what our modules import."""

from servestatic.storage import CompressedManifestStaticFilesStorage


class HashedStaticFilesStorage(CompressedManifestStaticFilesStorage):
    """Rewrites `import … from "./x.js"` in the console's own modules only: Django's pattern would search plotly.js too."""

    patterns = (
        *CompressedManifestStaticFilesStorage.patterns,
        ("console/js/*.js", CompressedManifestStaticFilesStorage._js_module_import_aggregation_patterns[1]),
    )
